"""Options that another option keeps from having an effect are named, with what they need."""

import pytest
from machines import Machines

from rlsys.checks.unused import NEEDS, find_unused_options
from rlsys.config.loading import load_config, option_names

BASE = "model: {path: builtin:tiny}\n"
CASES = [  # without effect; what gives it one
    ("critic.lam=0.9", "algorithm.advantage=gae"),
    ("reference.ranks=2", "reference.kl_coef=0.01"),
    ("reference.kl_in=reward", "reference.kl_coef=0.01"),
    ("algorithm.kl=k2", "reference.kl_coef=0.01"),
    ("entropy.share=0.1", "entropy.control=kl_cov"),
    ("overlong.penalty=0.5", "overlong.buffer=3"),
    ("dynamic_sampling.max_rounds=3", "dynamic_sampling.enabled=true"),
    ("episode.window=64", "episode.tools=[python]"),
    ("eval.samples=4", "eval.datasets={builtin:zigzag: {}}"),
    ("rollout.gpu_memory=0.5", "cluster.device=gpu"),
]


@pytest.fixture
def find(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    return lambda *overrides: find_unused_options(load_config(tmp_path / "base.yaml", overrides))


def test_the_defaults_are_no_matter_on_any_device(find):
    assert find() == find("cluster.device=gpu") == []


@pytest.mark.parametrize(("option", "needed"), CASES)
def test_an_option_is_named_only_while_it_has_no_effect(find, option, needed):
    (sentence,) = find(option)
    assert option.partition("=")[0] in sentence
    assert needed.partition("=")[0] in sentence
    assert find(option, needed) == []


def test_a_play_that_every_data_set_replaces_by_its_own_is_named(find):
    own = "data.train={builtin:zigzag: {episode: guess}}"
    (sentence,) = find("episode=guess_scored", own)
    assert sentence.startswith("episode.play: without effect; to have one, a data set without an episode of its own")
    assert find("episode=guess_scored") == []
    assert find("episode=guess_scored", own, "eval.datasets={builtin:seeds: {}}") == []
    (sentence,) = find("episode=guess_scored", own, "eval.datasets={builtin:seeds: {episode: guess}}")
    assert sentence.startswith("episode.play:")
    assert find("episode={window: 64}", own) == [], "the limits are for all"


def test_what_is_done_with_a_bad_call_matters_to_the_built_in_play_alone(find):
    (sentence,) = find("episode={play: guess, on_bad_call: end}")
    assert sentence.startswith("episode.on_bad_call: without effect; to have one, an episode played by `tools`")
    assert find("episode={tools: [python], on_bad_call: end}") == []
    assert find("episode.on_bad_call=end", "data.train={builtin:zigzag: {episode: tools}}") == []


def test_options_of_cpu_engines_do_nothing_on_gpus(find):
    assert find("rollout.kv_cache_mb=128") == []
    (sentence,) = find("cluster.device=gpu", "rollout.kv_cache_mb=128")
    assert sentence.startswith("rollout.kv_cache_mb:")


def test_options_with_one_need_share_a_sentence(find):
    (sentence,) = find("critic.lam=0.9", "critic.clip=0.1")
    assert sentence.startswith("critic.clip, critic.lam: without effect")


def test_all_options_exist():
    for option in (option for options, _, _ in NEEDS for option in options):
        assert any(name == option or (name.startswith(option) and option.endswith(".")) for name in option_names())


def test_what_is_said_to_have_no_effect_has_none_on_a_run(tmp_path):
    options = ["critic.lam=0.5", "critic.clip=0.01", "reference.kl_in=reward", "algorithm.kl=k2", "entropy.share=0.5"]
    options += ["overlong.penalty=5"]
    runs = []
    for name, more in (("plain", []), ("changed", options)):
        (tmp_path / name).mkdir()
        machines = Machines(tmp_path / name, "trainer.steps=2", *more).run()
        figures = [
            {k: v for k, v in line.items() if not k.startswith(("time/", "tokens_per"))} for line in machines.lines
        ]
        columns = [machines.column(f"step-00000{step}", c) for step in (1, 2) for c in ("reward", "advantage")]
        runs.append((figures, columns, machines.policy.kl_coefs))
    named = " ".join(find_unused_options(machines.config))
    assert [option for option in options if option.partition("=")[0] not in named] == []
    assert runs[0] == runs[1]
