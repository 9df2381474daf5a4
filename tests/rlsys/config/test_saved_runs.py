"""Options that are gone are refused with what stands in their place, and runs that were saved with them go on."""

import pytest
from omegaconf import OmegaConf

from rlsys.config.loading import flatten, load_config, option_names
from rlsys.config.saved_runs import RETIRED
from rlsys.config.schema import Config
from rlsys.errors import ConfigError


@pytest.fixture
def saved(tmp_path):
    """Reads a run whose config.yaml has these lines."""

    def read(text, name="config.yaml"):
        (tmp_path / name).write_text(text)
        (tmp_path / "metrics.jsonl").touch()
        return load_config(tmp_path / name, ["run.dir=x"])

    return read


@pytest.mark.parametrize("option", RETIRED)
def test_an_option_that_is_gone_says_what_stands_in_its_place(tmp_path, option):
    (tmp_path / "mine.yaml").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "mine.yaml", [f"{option}=1"])
    [problem] = caught.value.problems
    assert problem == f"command line: `{option}` is no longer an option: {RETIRED[option][0]}."
    assert option not in option_names()


@pytest.mark.parametrize(("option", "value"), [(o, v) for o, (_, harmless) in RETIRED.items() for v in harmless or ()])
def test_a_saved_run_may_have_such_an_option_where_it_learns_the_same_without(saved, option, value):
    *sections, name = option.split(".")
    tree = {name: value}
    for section in reversed(sections):
        tree = {section: tree}
    assert flatten(saved(OmegaConf.to_yaml(OmegaConf.create(tree)))) == flatten(Config()) | {"run.dir": "x"}


def test_a_saved_run_goes_on_without_options_of_how_it_was_computed(saved):
    config = saved("run: {grace_s: 3}\nreward: {batch: 7}\nwatchdog: {action: abort}\ntrainer: {steps: 7}")
    assert flatten(config) == flatten(Config()) | {"run.dir": "x", "trainer.steps": 7}


def test_a_saved_run_that_would_learn_something_else_is_refused(saved):
    with pytest.raises(ConfigError, match=r"config.yaml: `entropy.kl_coef` is no longer an option: the KL term"):
        saved("entropy: {kl_coef: 3.0}")


def test_a_configuration_that_is_no_run_is_refused_whatever_the_value(saved):
    with pytest.raises(ConfigError, match=r"mine.yaml: `run.grace_s` is no longer an option"):
        saved("run: {grace_s: 25.0}", name="mine.yaml")


@pytest.mark.parametrize(
    ("text", "now"),
    [
        ("policy: {offload_optimizer: true, offload_params: false}", {"policy.offload": ["optimizer"]}),
        ("policy: {offload_optimizer: true, offload_params: true}", {"policy.offload": ["optimizer", "params"]}),
        ("policy: {beta1: 0.8, beta2: 0.999}", {"policy.betas": [0.8, 0.999]}),
        ("reference: {zero_stage: 3, gpus: 1.0, offload: true}", {"reference.place": "split"}),
        ("reference: {zero_stage: 0, gpus: 1.0, offload: true}", {"reference.place": "offload"}),
        ("reference: {zero_stage: 0, gpus: 0.0, offload: false}", {"reference.place": "cpu"}),
        ("reference: {zero_stage: 0, gpus: 1.0, offload: false}", {}),
    ],
)
def test_a_saved_run_keeps_what_has_another_name_now(saved, text, now):
    assert flatten(saved(text)) == flatten(Config()) | {"run.dir": "x"} | now
