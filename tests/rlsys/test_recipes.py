import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys import data
from rlsys.config import Config, ConfigError
from rlsys.config_load import load
from rlsys.rewards import REWARDS

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def load_with_data(path: Path, folder: Path) -> Config:
    """Loads a file in `folder`, once the data it asks for is there. That it is not there may be the only problem."""
    try:
        return load(path)
    except ConfigError as error:
        for problem in error.problems:
            missing = re.fullmatch(r"(?:data\.train|eval\.datasets): (data/\S+) does not exist \(from .*\)\.", problem)
            assert missing, problem
            (folder / missing[1]).parent.mkdir(exist_ok=True)
            (folder / missing[1]).touch()
    return load(path)


def test_there_are_files_to_check():
    assert {"tiny_cpu", "grpo", "ppo", "dapo_32b_gpu"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_file_is_valid_once_its_data_is_there(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = load_with_data(path, tmp_path)
    assert found.run.dir == f"runs/{path.stem}"
    assert found.cluster.device == ("gpu" if path.stem.endswith("_gpu") else "cpu")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_file_says_what_is_known_of_it(path):
    header = path.read_text().partition("\n\n")[0]
    for line in ("# Goal      ", "# Hardware  ", "# Time      ", "# Result    "):
        assert header.count(line) == 1, line
    if path.stem.endswith("_gpu"):
        assert "NOT RUN BY US" in header
    assert f"`{path.name}`" in (ROOT / "configs" / "README.md").read_text()


@pytest.mark.parametrize("path", [p for p in CONFIGS if not p.stem.endswith("_gpu")], ids=lambda path: path.stem)
def test_the_tiny_recipes_train_on_as_many_samples(path):
    found = load(path)
    assert found.trainer.prompts_per_step * found.trainer.samples_per_prompt == 512
    assert found.model.path == "builtin:tiny"


def test_the_script_in_the_countdown_recipe_writes_prompts_that_can_be_solved(tmp_path):
    header = (ROOT / "configs" / "grpo_countdown_3b_gpu.yaml").read_text()
    lines = header.partition("<<'END'\n")[2].partition("#   END\n")[0].splitlines()
    (tmp_path / "data").mkdir()
    subprocess.run([sys.executable, "-c", "\n".join(line[4:] for line in lines)], cwd=tmp_path, check=True)
    files = {name: list(data.rows(f"{tmp_path}/data/countdown_{name}.jsonl", "prompt")) for name in ("train", "test")}
    assert {name: len(rows) for name, rows in files.items()} == {"train": 20000, "test": 512}
    for _, row in files["test"] + files["train"][:500]:
        assert len(row["numbers"]) in (3, 4)
        assert all(str(number) in row["prompt"] for number in [*row["numbers"], row["target"]])
        assert REWARDS["countdown"](row["solution"], row["numbers"], row["target"]) == 1.0
    seen = {(*sorted(row["numbers"]), row["target"]) for _, row in files["train"]}
    assert not seen & {(*sorted(row["numbers"]), row["target"]) for _, row in files["test"]}
