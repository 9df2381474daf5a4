"""`rlsys convert`: from published files to rows that a run can load."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest
from click.testing import CliRunner
from published import GSM8K, array, countdown_rows, dapo_row, gsm8k, math_row, math_tree, table

from launch.tools.convert.command import convert
from rlsys import data
from rlsys.checks import load_checked
from rlsys.data import DatasetPreparer, Origin, PromptFormat, SelectionRules
from rlsys.errors import ConfigError
from rlsys.tasks import zigzag

BOX = "Reason step by step and put the final answer in \\boxed{}."


def run(*arguments):
    """What the command prints."""
    done = CliRunner().invoke(convert, [str(a) for a in arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def rows(file):
    if file.suffix == ".parquet":
        return pyarrow.parquet.read_table(file).to_pylist()
    return [json.loads(line) for line in file.read_text().splitlines()]


def loaded(file, **form):
    """As a run reads it."""
    tokenizer = zigzag.make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    origin = Origin(str(file))
    return list(
        data.select_rows(
            origin, DatasetPreparer(tokenizer, print)(origin, PromptFormat(**form)), SelectionRules(10_000)
        )
    )


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_copy_of_gsm8k_becomes_data_that_a_run_can_load(tmp_path, ending):
    out = tmp_path / "data" / f"gsm8k_train.{ending}"
    output = run("gsm8k", gsm8k(tmp_path / "gsm8k"), out, "--subset", "main")
    assert output == f"{out}: 2 prompts from 2 rows of {tmp_path}/gsm8k\n"
    assert rows(out) == [
        {"prompt": [{"role": "user", "content": f"How many clips?\n{BOX}"}], "answer": "72", "source": "gsm8k"},
        {"prompt": [{"role": "user", "content": f"How many more?\n{BOX}"}], "answer": "1072", "source": "gsm8k"},
    ]
    first, _ = loaded(out)
    assert (first.source, first.row, first.text) == ("gsm8k", {"answer": "72"}, f"How many clips?\n{BOX}")
    run("gsm8k", tmp_path / "gsm8k", tmp_path / "test.jsonl", "--subset", "main", "--split", "test")
    assert len(rows(tmp_path / "test.jsonl")) == 1


def test_without_a_source_the_hub_is_read(tmp_path, monkeypatch):
    import datasets

    loads = []

    def load_dataset(*arguments, **options):
        loads.append((arguments, options))
        return datasets.Dataset.from_list(GSM8K)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    run("gsm8k", "a.jsonl")
    run("gsm8k", "openai/gsm8k", "b.jsonl", "--split", "test")
    run("gsm8k", "someone/gsm8k", "c.jsonl")
    assert loads == [
        (("openai/gsm8k", "main"), {"split": "train"}),
        (("openai/gsm8k", "main"), {"split": "test"}),
        (("someone/gsm8k", None), {"split": "train"}),
    ]
    assert rows(tmp_path / "a.jsonl") == rows(tmp_path / "b.jsonl")


def test_the_published_tree_of_files_of_math_is_read(tmp_path):
    math_tree(tmp_path / "MATH")
    run("math", tmp_path / "MATH", tmp_path / "math.jsonl", "--instruction", "")
    assert [
        (r["prompt"][0]["content"], r["answer"], r["level"], r["subject"]) for r in rows(tmp_path / "math.jsonl")
    ] == [
        ("Problem 1", "1", 1, "algebra"),
        ("Problem 2", "2", 5, "geometry"),
    ]
    output = run("math", tmp_path / "MATH", tmp_path / "hard.jsonl", "--level", 4, "--level", 5)
    assert "hard.jsonl: 1 prompts from 2 rows" in output
    assert "1 were not asked for" in output


def test_fields_that_the_first_row_lacks_are_kept(tmp_path):
    first = math_row("algebra", 1, 1) | {"level": "Level ?"}  # as some in MATH are
    source = array(tmp_path / "math.json", [first, math_row("algebra", 2, 5)])
    for ending in ("jsonl", "parquet"):
        run("math", source, out := tmp_path / f"out.{ending}")
        assert [r.get("level") for r in rows(out)] == [None, 5]


def test_repetitions_of_dapo_are_left_out_and_counted(tmp_path):
    file = table(
        tmp_path / "dapo-math-17k.parquet",
        [dapo_row(f"Question {n % 3}", n % 3, n) for n in range(30)] + [dapo_row("Question 0", 9, 30)],
    )
    output = run("dapo", file, tmp_path / "dapo.jsonl", "--text")
    assert "3 prompts from 31 rows" in output
    assert "28 repeated a question and were left out" in output
    assert "1 of them with another answer; the first is kept" in output
    assert [(r["prompt"], r["answer"]) for r in rows(tmp_path / "dapo.jsonl")] == [
        (f"Question {n}\n{BOX}\n", f"{n}") for n in range(3)
    ]


def test_countdown_splits_into_parts_by_start_and_count(tmp_path):
    file = table(tmp_path / "countdown.parquet", countdown_rows(10, 30))
    run("countdown", file, tmp_path / "train.jsonl", "--count", 15, "--text")
    output = run("countdown", file, tmp_path / "test.jsonl", "--start", 15, "--text")
    assert [r["target"] for r in rows(tmp_path / "train.jsonl")] == list(range(10, 25))
    assert [r["target"] for r in rows(tmp_path / "test.jsonl")] == list(range(25, 30))
    assert "15 were not asked for" in output
    prompt = loaded(tmp_path / "test.jsonl")[0]
    assert prompt.row == {"numbers": [25, 1, 1], "target": 25}
    assert "make 25.\nThink step by step" in prompt.text


def test_deepscaler_is_an_array_and_bad_rows_are_listed(tmp_path):
    good = {"problem": "p", "answer": "\\frac{1}{2}", "solution": "s"}
    array(tmp_path / "deepscaler.json", [good, {"question": "?"}, 7, good])
    output = run("deepscaler", tmp_path / "deepscaler.json", tmp_path / "out.jsonl", "--name", "aime")
    assert "1 prompts from 4 rows" in output
    assert "1 repeated a question" in output
    assert "cannot be used: 1 not of this set's form, 1 not an object" in output
    assert "deepscaler.json:7: `problem` is not a text; the row has question" in output
    assert rows(tmp_path / "out.jsonl")[0]["source"] == "aime"


def test_no_file_is_written_without_rows_and_none_is_overwritten(tmp_path):
    file = table(tmp_path / "a.parquet", [{"question": "q", "answer": "72"}])
    with pytest.raises(ConfigError, match="none of 1 rows became a prompt"):
        run("gsm8k", file, tmp_path / "out.jsonl")
    good = table(tmp_path / "b.parquet", [{"question": "q", "answer": "#### 72"}])
    with pytest.raises(ConfigError, match=r"became a prompt; 1 were not asked for \(--start, --level\)"):
        run("gsm8k", good, tmp_path / "out.jsonl", "--start", 1)
    with pytest.raises(ConfigError, match=r"a\.parquet/out\.jsonl cannot be written: "):
        run("gsm8k", good, tmp_path / "a.parquet" / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="Give --force"):
        run("gsm8k", table(tmp_path / "b.parquet", GSM8K), tmp_path / "out.jsonl")
    run("gsm8k", tmp_path / "b.parquet", tmp_path / "out.jsonl", "--force")
    assert len(rows(tmp_path / "out.jsonl")) == 2
    with pytest.raises(ConfigError, match=r"must end in \.jsonl or \.parquet"):
        run("gsm8k", tmp_path / "b.parquet", tmp_path / "out.csv")
    assert "are at most two" in run("gsm8k", "a", "b", "c")


def test_commands_in_recipes_make_the_files_that_the_recipes_name(tmp_path, monkeypatch):
    import shlex

    from launch.tools.convert import conversion

    made = []
    monkeypatch.setattr(conversion, "convert_to_file", lambda *places, **_: made.append(str(places[2])) or "")
    configs = Path(__file__).parents[3] / "configs"
    recipes = [file for file in configs.glob("*.yaml") if "rlsys convert" in file.read_text()]
    assert len(recipes) >= 4
    for file in recipes:
        commands = [line[4:] for line in file.read_text().splitlines() if line.startswith("#   rlsys convert")]
        made.clear()
        for command in commands:
            assert run(*shlex.split(command)[2:]) == "\n"
        monkeypatch.chdir(tmp_path)
        for name in made:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        config = load_checked(file)
        assert {*config.data.train, *config.eval.datasets} == set(made)
