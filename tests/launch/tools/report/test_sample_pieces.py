"""The samples in a report: what fits into its limit, and how it is written."""

import itertools
import re

import numpy as np
import pytest
from made_run import damage, make_run
from reports import decompress, read_pieces, run_report

from launch.tools.report.sample_pieces import (
    choose_pieces,
    sample_files,
    sample_numbers,
    sample_texts,
    sample_tokens,
    spread_order,
)
from launch.tools.report.token_texts import load_token_texts, show_bytes, token_text


def test_numbers_of_samples_are_columns_or_single_values(tmp_path):
    run = make_run(tmp_path / "demo", 1, prompts=2, samples=3)
    [first, step] = [sample_numbers(f) for f in sample_files(run)]
    assert (first["name"], first["kind"], first["step"], first["advantage"]) == ("eval-000000", "eval", 0, None)
    assert (step["kind"], step["step"], step["count"], step["version"]) == ("step", 1, 6, 1)
    assert step["groups"] == [["zigzag:1#0", "zigzag", 3], ["zigzag:2#0", "zigzag", 3]]
    assert len(step["length"]) == len(step["reward"]) == 6


def test_tokens_have_their_text_and_three_numbers(tmp_path):
    run = make_run(tmp_path / "demo", 1, prompts=1, samples=2)
    file = run / "samples" / "step-000001.parquet"
    tokens = sample_tokens(file, None, load_token_texts(run, "builtin:tiny"))
    text = "".join(tokens["words"][i] for i in tokens["ids"][0])
    assert text == sample_texts(file)["text"][0] + "<eos>"
    assert all(v <= 0 for v in tokens["logprob"][0])
    assert tokens["gap"][0] == pytest.approx([1e-6] * len(tokens["ids"][0]), rel=0.3)
    assert tokens["advantage"] is None, "all tokens have the sample's own"
    assert sample_tokens(file, None, None)["words"] is None


def test_pieces_can_be_limited_to_the_first_groups(tmp_path):
    run = make_run(tmp_path / "demo", 1, prompts=3, samples=2)
    file = run / "samples" / "step-000001.parquet"
    assert len(sample_texts(file, 1)["prompt"]) == 1
    assert len(sample_texts(file, 2)["text"]) == len(sample_tokens(file, 2, None)["ids"]) == 4
    assert len(sample_texts(file)["text"]) == len(sample_texts(file, 3)["text"]) == 6


def test_the_first_files_are_evenly_spread():
    assert spread_order(0) == []
    assert spread_order(1) == [0]
    assert spread_order(5) == [4, 0, 2, 1, 3]
    assert sorted(spread_order(100)) == list(range(100))
    few = sorted(spread_order(100)[:9])
    gaps = [b - a for a, b in itertools.pairwise(few)]
    assert max(gaps) <= 2 * min(gaps)


def test_samples_without_room_are_left_out_and_the_report_says_so(tmp_path):
    run = make_run(tmp_path / "demo", 40)
    files = sample_files(run)
    whole, _ = choose_pieces(files, 1 << 20, None, lambda f: 4)
    assert len(whole) == len(files)
    size = sum(one.size for one in whole.values())
    some, _ = choose_pieces(files, size // 3, None, lambda f: 4)
    assert 0 < sum(one.size for one in some.values()) <= size // 3
    assert {"step-000040", "step-000001", "eval-000040", "eval-000000"} <= set(some), "the first and the last"
    output = run_report(run, megabytes=size / 3 / (1 << 20))
    assert re.search(r"Texts and tokens of \d+ of 182 groups are in this file", output)
    pieces = read_pieces(run / "report.html")
    assert len(pieces["numbers"]) == 51, "the numbers of all samples are there"
    assert "--megabytes" in pieces["main"]["left_out"]
    assert "Texts and tokens" not in run_report(run)


def test_a_large_step_keeps_its_first_groups(tmp_path):
    run = make_run(tmp_path / "demo", 1, prompts=64, samples=8)
    files = sample_files(run)[-1:]
    whole = choose_pieces(files, 1 << 20, None, lambda f: 64)[0]["step-000001"]
    part = choose_pieces(files, whole.size * 4, None, lambda f: 64)[0]["step-000001"]
    assert 1 <= part.groups < 64
    assert part.size <= whole.size / 2
    assert len(decompress(part.texts)["prompt"]) == part.groups


@pytest.mark.parametrize("how", ["empty", "cut", "hollow"])
def test_a_damaged_file_of_samples_is_reported_and_the_rest_is_shown(tmp_path, how):
    run = make_run(tmp_path / "demo", 3)
    damage(run / "samples" / "step-000002.parquet", how)
    output = run_report(run)
    assert "demo/report.html" in output
    assert "samples/step-000002.parquet cannot be read and is left out: " in output
    pieces = read_pieces(run / "report.html")
    assert [one["name"] for one in pieces["numbers"]] == ["eval-000000", "step-000001", "step-000003"]
    assert "texts-step-000003" in pieces
    assert "texts-step-000002" not in pieces
    [missing] = [text for text in pieces["main"]["runs"][0]["missing"] if "cannot be read" in text]
    assert missing in output


def test_of_many_damaged_files_five_are_named_and_the_others_counted(tmp_path):
    run = make_run(tmp_path / "demo", 12)
    for file in sample_files(run):
        damage(file, "empty")
    run_report(run)
    pieces = read_pieces(run / "report.html")
    assert pieces["numbers"] == []
    missing = pieces["main"]["runs"][0]["missing"]
    assert [text.partition(" ")[0] for text in missing] == [
        *(f"samples/{file.name}" for file in sample_files(run)[:5]),
        "11",
    ]
    assert missing[-1] == "11 more of samples/ cannot be read and are left out."


def test_without_samples_the_page_says_so(tmp_path):
    run = make_run(tmp_path / "demo", 2, saved=False)
    run_report(run)
    pieces = read_pieces(run / "report.html")
    assert pieces["numbers"] == []
    assert "No samples are saved in samples/." in pieces["main"]["runs"][0]["missing"]


def test_token_texts_keep_blanks_and_show_partial_characters_as_bytes(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"a": 0, "Ġthe": 1, "âĤ": 2, "¬": 3, "<end>": 4, "Ċ": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    assert [token_text(tokenizer, i) for i in range(6)] == ["a", " the", "‹e2 82›", "‹ac›", "<end>", "\n"]
    assert show_bytes("<0xE2>") == "‹e2›"
    (tmp_path / "checkpoints" / "step-000007" / "model").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "checkpoints" / "step-000007" / "model" / "tokenizer.json"))
    assert load_token_texts(tmp_path, "nobody/nothing")([1, 99]) == [" the", "‹99›"]


def test_without_a_tokenizer_there_are_no_token_texts(tmp_path):
    assert load_token_texts(tmp_path, "nobody/nothing-of-this-name") is None
    assert load_token_texts(tmp_path, "") is None


def test_log_probs_are_kept_to_a_thousandth(tmp_path):
    run = make_run(tmp_path / "demo", 1, prompts=1, samples=1)
    file = run / "samples" / "step-000001.parquet"
    import pyarrow.parquet

    exact = pyarrow.parquet.read_table(file)["rollout_logprobs"][0].as_py()
    assert np.array(sample_tokens(file, None, None)["logprob"][0]) / 1000 == pytest.approx(exact, abs=5e-4 + 1e-9)
