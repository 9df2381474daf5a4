import re
from pathlib import Path

import pytest

from rlsys.checks import load_checked
from rlsys.checks.notes import find_notes
from rlsys.config.derived import correction_method, is_supervised
from rlsys.config.loading import load_config
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.models.known_shapes import BUILTIN_MODELS

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def load_with_data(path: Path, folder: Path) -> Config:
    """Loads a file in `folder`, once the data it asks for is there. That it is not there may be the only problem."""
    try:
        return load_checked(path)
    except ConfigError as error:
        for problem in error.problems:
            if problem.startswith("model.path: models/gemma-3-270m/config.json does not exist."):
                (folder / "models/gemma-3-270m").mkdir(parents=True)
                (folder / "models/gemma-3-270m/config.json").write_text("{}")
                continue
            missing = re.fullmatch(r"(?:data\.train|eval\.datasets): (data/\S+) does not exist \(from .*\)\.", problem)
            assert missing, problem
            (folder / missing[1]).parent.mkdir(exist_ok=True)
            (folder / missing[1]).touch()
    return load_checked(path)


def test_there_are_files_to_check():
    assert {"tiny_cpu", "grpo", "ppo", "dapo_32b_gpu"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_file_is_valid_once_its_data_is_there(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_with_data(path, tmp_path)
    assert config.run.dir == f"runs/{path.stem}"
    assert config.cluster.device == ("gpu" if path.stem.endswith("_gpu") else "cpu")
    assert correction_method(config) == ("tis" if path.stem.endswith("_gpu") else "none"), "bfloat16 rounds differently"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_file_says_what_is_known_of_it(path):
    header = path.read_text().partition("\n\n")[0]
    for line in ("# Goal      ", "# Hardware  ", "# Time      ", "# Result    "):
        assert header.count(line) == 1, line
    if path.stem.endswith("_gpu"):
        assert "NOT RUN BY US" in header
    assert f"`{path.name}`" in (ROOT / "configs" / "README.md").read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_file_makes_a_choice_that_is_noted_as_probably_not_meant(path):
    assert list(find_notes(load_config(path, []))) == []


TINY = [p for p in CONFIGS if not p.stem.endswith("_gpu") and p.stem != "gemma3_270m_cpu"]


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_the_tiny_recipes_train_on_as_many_samples(path):
    config = load_checked(path)
    samples = config.trainer.prompts_per_step * config.trainer.samples_per_prompt
    assert samples == (64 if is_supervised(config) else 512)
    assert config.model.path in BUILTIN_MODELS
