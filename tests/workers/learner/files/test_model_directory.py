"""A model directory from a stranger cannot run code."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.models import load_limits, load_tokenizer
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from workers.learner.files.loading import load_packed
from workers.learner.files.policy_checkpoint import write_model_settings

CODE = """
open({mark!r}, "w")
from transformers import PretrainedConfig
class Evil(PretrainedConfig):
    model_type = "evil"
"""


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def directory(model: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


def test_code_beside_the_weights_is_not_run(directory: Path, tiny: Callable[..., Config], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (directory / "evil.py").write_text(CODE.format(mark=str(mark)))
    for name, classes in {
        "config.json": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
        "tokenizer_config.json": {"AutoTokenizer": ["evil.Evil", None]},
    }.items():
        settings = json.loads((directory / name).read_text())
        (directory / name).write_text(
            json.dumps(settings | {"auto_map": classes, "model_type": "evil", "tokenizer_class": "Evil"})
        )
    config = tiny(f"model.path={directory}")
    with pytest.raises(ConfigError, match="custom code"):
        load_tokenizer(str(directory), config)
    for load in (lambda: load_limits(str(directory), config), lambda: load_packed(config, str(directory))):
        with pytest.raises(ValueError, match="custom code"):
            load()
    assert not mark.exists()


def test_pickled_weights_hold_only_numbers_or_are_refused(
    directory: Path, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    mark, config = tmp_path / "mark", tiny(f"model.path={directory}")
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")
    assert load_packed(config, str(directory)).lm.num_parameters() > 0
    torch.save(weights | {"lm_head.weight": Attack(mark)}, directory / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights"):
        load_packed(config, str(directory))
    assert not mark.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch ' ~ messages[0].content) }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_chat_template_cannot_leave_its_sandbox(template: str, model: str, tmp_path: Path) -> None:
    from jinja2.exceptions import SecurityError
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": str(tmp_path / "mark")}], tokenize=False)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "authors", [{"temperature": 0.9, "top_p": 0.6}, {"do_sample": False, "top_k": 20}, {"do_sample": True, "top_k": 5}]
)
def test_a_checkpoint_keeps_the_authors_generation_config(
    directory: Path, tiny: Callable[..., Config], tmp_path: Path, authors: dict[str, float]
) -> None:
    """transformers reads the first two configurations, but refuses to write them."""
    (directory / "generation_config.json").write_text(json.dumps(authors))
    config = tiny(f"model.path={directory}")
    lm = load_packed(config, str(directory)).lm
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_model_settings(lm, lm.config, tmp_path / name)
        assert authors.items() <= json.loads((tmp_path / name / "generation_config.json").read_text()).items()
        assert (tmp_path / name / "config.json").is_file()
