"""`rlsys compare`: two evaluations side by side."""

import io
import re

import pytest
from rich.console import Console
from saved import save

from launch.tools.compare import compare
from rlsys.errors import ConfigError


@pytest.fixture
def compared(tmp_path):
    """`compared(a, b)` is what is printed, with single blanks; a and b map uids to scores, or are paths."""

    def compared(a, b, step=None, lines=5, width=200, one_blank=True, **how) -> str:
        paths = [
            save(tmp_path / f"{n}.parquet", s, **how) if isinstance(s, dict) else s for n, s in (("a", a), ("b", b))
        ]
        out = io.StringIO()
        compare(str(paths[0]), str(paths[1]), step, lines, Console(file=out, width=width))
        return re.sub(" +", " ", out.getvalue()) if one_blank else out.getvalue()

    return compared


def uids(count: int, source: str = "s") -> list[str]:
    return [f"{source}:{i}" for i in range(count)]


def test_both_means_their_difference_and_how_many_prompts_went_which_way(compared):
    a = {"s:1": [1, 0], "s:2": [0, 0], "s:3": [1, 1], "s:4": [1, 1]}
    b = {"s:1": [1, 1], "s:2": [0, 1], "s:3": [0, 0], "s:4": [1, 1]}
    text = compared(a, b)
    assert "prompts in both: 4, matched by uid" in text
    assert re.search(r"s 4 0\.625 0\.625 \+0\.000 -\S+ \+\S+ 1 2/1/1", text)


def test_a_clear_difference_names_the_better_side(compared):
    worse, better = {u: [0] for u in uids(12)}, {u: [1] for u in uids(12)}
    assert "B is better (p = 0.00049)." in compared(worse, better)
    assert "A is better (p = 0.00049)." in compared(better, worse)
    assert "McNemar's exact test says p = 0.00049." in compared(better, worse)


def test_a_difference_that_may_be_chance_is_called_none(compared):
    a, b = {u: [0.0] for u in uids(12)}, {u: [float(i < 5)] for i, u in enumerate(uids(12))}
    assert "No difference that 12 prompts can tell from chance (p = 0.062)." in compared(a, b)


def test_equal_evaluations_are_said_to_be_equal(compared):
    same = {u: [1, 0] for u in uids(3)}
    text = compared(same, same)
    assert "A and B score alike on every prompt." in text
    assert "0/0/3" in text
    assert "McNemar" not in text, "it is for one answer each"


def test_each_source_has_its_line_and_all_together_theirs(compared):
    a = {"x:1": [0], "x:2": [1], "y:1": [0]}
    b = {"x:1": [1], "x:2": [1], "y:1": [0]}
    rows = [line.split() for line in compared(a, b).splitlines()]
    assert [row[:5] for row in rows if row and row[0] in ("x", "y", "all")] == [
        ["x", "2", "0.500", "1.000", "+0.500"],
        ["y", "1", "0.000", "0.000", "+0.000"],
        ["all", "3", "0.333", "0.667", "+0.333"],
    ]


def test_failed_verdicts_and_prompts_without_any_verdict_are_left_out(compared):
    text = compared({"s:1": [1, None], "s:2": [None]}, {"s:1": [0, 0], "s:2": [1]})
    assert "prompts of A without a verdict, left out: 1" in text
    assert "prompts in B only, which are not compared: 1 of 2" in text
    assert "s 1 1.000 0.000 -1.000" in text


def test_prompts_of_one_side_only_are_counted(compared):
    text = compared({u: [1] for u in uids(3)}, {u: [1] for u in uids(5)})
    assert "prompts in both: 3," in text
    assert "prompts in B only, which are not compared: 2 of 5" in text
    assert "A only" not in text


def test_prompts_of_other_uids_are_matched_by_their_text(compared, tmp_path):
    a = save(tmp_path / "left.parquet", {"s:1": [0], "s:2": [1]}, prompts={"s:1": "one?", "s:2": "two?"})
    b = save(tmp_path / "right.parquet", {"t:2": [1], "t:1": [1]}, prompts={"t:2": "one?", "t:1": "two?"})
    text = compared(a, b)
    assert "prompts in both: 2, matched by the text of the prompt" in text
    assert "s 2 0.500 1.000 +0.500" in text


def test_prompts_shifted_by_an_extra_row_are_matched_by_text(compared, tmp_path):
    a, b = (
        save(
            tmp_path / f"{name}.parquet",
            {f"s:{i}": [0] for i in range(len(texts))},
            prompts={f"s:{i}": f"{text}?" for i, text in enumerate(texts)},
        )
        for name, texts in (("left", "abcdef"), ("right", "abXcdef"))
    )
    text = compared(a, b)
    assert "prompts in both: 6, 2 matched by uid, 4 matched by the text of the prompt" in text
    assert "A only" not in text
    assert "prompts in B only, which are not compared: 1 of 7" in text


def test_prompts_of_one_text_count_as_one(compared, tmp_path):
    twice = save(tmp_path / "left.parquet", {"s:1": [0], "s:2": [1]}, prompts={"s:1": "one?", "s:2": "one?"})
    once = save(tmp_path / "right.parquet", {"t:1": [1]}, prompts={"t:1": "one?"})
    text = compared(twice, once)
    assert "prompts in both: 1, matched by the text" in text
    assert "only" not in text


def test_one_chat_in_two_templates_is_one_prompt_in_another_row_too(compared, tmp_path):
    chat = [{"role": "user", "content": "one?"}]
    a = save(tmp_path / "left.parquet", {"s:1": [0]}, prompts={"s:1": "<user>one?"}, messages=chat)
    b = save(tmp_path / "right.parquet", {"s:2": [1]}, prompts={"s:2": "[INST] one?"}, messages=chat)
    assert "prompts in both: 1, matched by the text of the prompt" in compared(a, b)


def test_one_chat_in_two_templates_is_one_prompt(compared, tmp_path):
    chat = [{"role": "user", "content": "one?"}]
    a = save(tmp_path / "left.parquet", {"s:1": [0]}, prompts={"s:1": "<user>one?"}, messages=chat)
    b = save(tmp_path / "right.parquet", {"s:1": [1]}, prompts={"s:1": "[INST] one?"}, messages=chat)
    assert "prompts in both: 1, matched by uid" in compared(a, b)


def test_evaluations_that_share_no_prompt_are_refused_with_two_of_them(compared, tmp_path):
    a = save(tmp_path / "left.parquet", {"s:1": [0]}, prompts={"s:1": "one?"})
    b = save(tmp_path / "right.parquet", {"s:1": [0]}, prompts={"s:1": "two?"})
    with pytest.raises(
        ConfigError, match=r"share no prompt, though 1 uids: s:1 is 'one\?', s:1 of the other is 'two\?'"
    ):
        compared(a, b)


def test_runs_are_compared_by_their_newest_evaluation_or_that_of_a_step(compared, tmp_path):
    for run, last in (("a", 0.0), ("b", 1.0)):
        for step, score in ((0, 0.5), (20, last)):
            save(tmp_path / run / "samples" / f"eval-{step:06d}.parquet", {"s:1": [score]}, version=step)
    runs = tmp_path / "a", tmp_path / "b"
    text = compared(*runs)
    assert "eval-000020.parquet: 1 prompts, 1 samples" in text
    assert "s 1 0.000 1.000 +1.000" in text
    assert "s 1 0.500 0.500 +0.000" in compared(*runs, step=0)
    with pytest.raises(ConfigError, match="was not evaluated at step 10, but at 0, 20"):
        compared(*runs, step=10)


def test_a_target_without_an_evaluation_is_refused(compared, tmp_path):
    (tmp_path / "run").mkdir()
    good = save(tmp_path / "good.parquet", {"s:1": [1]})
    for bad, message in (("run", "holds no evaluation"), ("gone", "does not exist")):
        with pytest.raises(ConfigError, match=message):
            compared(good, tmp_path / bad)
    with pytest.raises(ConfigError, match="holds no sample with a score"):
        compared(good, save(tmp_path / "failed.parquet", {"s:1": [None]}))


def test_the_prompts_that_changed_most_are_shown_with_both_completions(compared):
    a = {"s:1": [0.0], "s:2": [1.0], "s:3": [0.5], "s:4": [0.5]}
    b = {"s:1": [1.0], "s:2": [0.0], "s:3": [0.75], "s:4": [0.5]}
    text = compared(a, b, lines=2)
    assert text.index("s:2: 1 of A, 0 of B") < text.index("s:1: 0 of A, 1 of B")
    assert "s:3" not in text
    assert " prompt what is s:2?\n A 1.0 it is\n B 0.0 it is\n" in text
    assert "s:1:" not in compared(a, b, lines=0)


def test_long_texts_are_shown_by_their_end_in_one_line(compared, tmp_path):
    long = {"s:1": ["begin\n" + "x" * 100 + " 42"]}
    a = save(tmp_path / "left.parquet", {"s:1": [0]}, texts=long)
    b = save(tmp_path / "right.parquet", {"s:1": [1]}, texts=long)
    texts = [line for line in compared(a, b, width=60).splitlines() if line.startswith(" A ")]
    assert len(texts) == 1
    assert texts[0].endswith("x 42")
    assert len(texts[0]) < 60


def test_the_table_fits_eighty_columns(compared):
    sides = [{u: [float(i % 7 < k)] for i, u in enumerate(uids(999, "gsm8k_test"))} for k in (3, 4)]
    [row] = [
        line for line in compared(*sides, width=80, one_blank=False).splitlines() if line.startswith("gsm8k_test ")
    ]
    assert len(row) <= 80
    assert row.split()[:4] == ["gsm8k_test", "999", "0.429", "0.573"]


def test_control_characters_are_escaped(compared, tmp_path):
    evil = "\x1b]0;mine\x07\x1b[2J"
    a, b = (
        save(tmp_path / f"{name}.parquet", {f"{evil}:1": [score]}, {f"{evil}:1": [f"it is{evil}"]})
        for name, score in (("left", 0), ("right", 1))
    )
    text = compared(a, b)
    assert not {"\x1b", "\x07"} & set(text)
    assert " A it is\\x1b]0;mine\\x07\\x1b[2J\n" in text
