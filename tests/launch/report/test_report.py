"""The data of the page, from a run directory to one file. The page itself is tested in test_report_page."""

import base64
import gzip
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import pytest
from made_run import BEGAN, EOS, damage, make_batch, make_run, ruin, write_lines
from rich.console import Console

from launch.report.charts import SECTIONS, choose_charts
from launch.report.command import ReportOptions, write_report
from launch.report.gather import ReportedRun, page_data
from launch.report.lanes import worker_lanes
from launch.report.page import HERE, SCRIPTS, inline_script
from launch.report.sample_pieces import (
    choose_pieces,
    compress_piece,
    sample_files,
    sample_numbers,
    sample_texts,
    sample_tokens,
    spread_order,
)
from launch.report.token_texts import load_token_texts, show_bytes, token_text
from launch.report.watch import create_server
from rlsys.analysis.trace import assign_lanes, fits_inside
from rlsys.analysis.trace import read_spans as recorded
from rlsys.config.schema import Config, ConfigError
from rlsys.runs.directory import read_lines
from rlsys.runs.samples import write_samples


def decompress(piece: bytes):
    return json.loads(gzip.decompress(piece))


def read_pieces(target) -> dict:
    """Returns the pieces inside a page."""
    pieces = re.findall(r'<script type="text/plain" id="piece-([^"]+)">([^<]*)</script>', target.read_text())
    return {name: decompress(base64.b64decode(text)) for name, text in pieces}


def run_report(*runs, **wanted) -> str:
    out = io.StringIO()
    write_report(ReportOptions(tuple(map(str, runs)), **wanted), Console(file=out, width=300))
    return out.getvalue()


def report_data(run) -> dict:
    [data] = page_data([ReportedRun.read(run)])["runs"]
    return data


# --- one file ---------------------------------------------------------------------------------------------------------


def test_a_report_is_written_into_the_run_and_is_self_contained(tmp_path):
    run = make_run(tmp_path / "demo")
    assert "demo/report.html" in run_report(run)
    text = (run / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!#)', text), "nothing is loaded from elsewhere"
    assert "connect-src 'none'" in text
    assert "<title>demo</title>" in text
    pieces = read_pieces(run / "report.html")
    assert set(pieces) >= {"main", "numbers", "texts-step-000001", "tokens-eval-000000"}
    assert pieces["main"]["runs"][0]["figures"]["step"] == list(range(13))


def test_the_script_of_the_page_is_the_only_one_that_may_run(tmp_path):
    import hashlib

    run = make_run(tmp_path / "demo", 1)
    run_report(run)
    text = (run / "report.html").read_text()
    [allowed] = re.findall(r"script-src 'sha256-([^']+)'", text)
    [script] = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() == allowed


def test_no_two_scripts_have_a_name_of_their_own_in_common():
    names = [
        name
        for file in SCRIPTS
        for name in re.findall(
            r"^(?:async )?(?:const|let|function|class) (\w+)", inline_script((HERE / file).read_text()), re.MULTILINE
        )
    ]
    assert len(names) == len(set(names))


def test_the_installation_includes_every_package_and_the_page():
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = project["package-data"]["launch.report"]
    root = HERE.parents[1]
    for top in ("rlsys", "workers", "launch"):
        packages = {f.parent for f in (root / top).rglob("__init__.py")}
        assert {f.parent for f in (root / top).rglob("*.py")} <= packages, (
            "setuptools finds packages by their __init__.py"
        )
    for name in ("page.html", "style.css", *SCRIPTS):
        assert (HERE / name).is_file()
        assert any(fnmatchcase(name, pattern) for pattern in patterns), name
    assert {f.name for f in HERE.glob("*.js")} == set(SCRIPTS)


def test_hostile_texts_cannot_close_an_element(tmp_path):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\x00\x1b[31m\u202e😀"
    run = make_run(tmp_path / "<b>&'\"", 2, texts={1: hostile})
    run_report(run)
    text = (run / "report.html").read_text()
    assert "alert(" not in text
    assert "<title>&lt;b&gt;&amp;" in text
    assert read_pieces(run / "report.html")["texts-step-000001"]["text"][0] == hostile


def test_another_file_can_be_named_and_its_folder_is_made(tmp_path):
    run = make_run(tmp_path / "demo", 1)
    run_report(run, out=str(tmp_path / "of" / "today" / "x.html"))
    assert (tmp_path / "of" / "today" / "x.html").is_file()
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("demo", r"--out: .*demo is a directory. Name a file in it: --out .*demo/report.html"),
        ("demo/", "is a directory"),
        ("new/", "is a directory"),
        (".", "is a directory"),
        ("pipe", "pipe is no plain file"),
        ("demo/config.yaml/x.html", r"x.html cannot be written: File exists. Name another file with --out"),
        ("demo/config.yaml/of/x.html", r"x.html cannot be written: Not a directory"),
        ("x" * 300, r"cannot be written: File name too long"),
    ],
)
def test_an_unwritable_target_is_refused_with_a_way_out(tmp_path, monkeypatch, out, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match=message):
        run_report(make_run(tmp_path / "demo", 1), out=out)


def test_a_path_without_a_run_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"is no run: it has no config.yaml.*Give the directory of a run"):
        run_report(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        run_report(tmp_path / "nowhere")


# --- runs that are not whole ------------------------------------------------------------------------------------------


def test_a_run_without_any_step_is_shown_and_says_so(tmp_path):
    run = make_run(tmp_path / "demo", 1, saved=False, timeline=False)
    (run / "metrics.jsonl").write_text("")
    (run / "events.jsonl").write_text("")
    run_report(run)
    data = read_pieces(run / "report.html")["main"]["runs"][0]
    assert data["state"]["kind"] == "open"
    assert "No step has been finished yet: there are no curves." in data["missing"]
    assert "No samples are saved in samples/." in data["missing"]
    assert any("no events.jsonl" in text for text in data["missing"])


def test_a_run_without_evaluations_says_so(tmp_path):
    run = make_run(tmp_path / "demo", 3)
    lines = [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in read_lines(run / "metrics.jsonl")]
    write_lines(run / "metrics.jsonl", lines)
    assert any("Nothing held out was evaluated" in text for text in report_data(run)["missing"])


def test_a_broken_last_line_and_invalid_numbers_are_ignored(tmp_path):
    run = make_run(tmp_path / "demo", 2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/mean": NaN, "kl": Infinity, "entropy": null}\n{"step": 4, "rew')
    data = report_data(run)
    assert data["figures"]["step"] == [0, 1, 2, 3]
    assert data["figures"]["reward/mean"][-1] is None
    assert data["figures"]["kl"][-1] is None
    assert data["figures"]["entropy"][-1] is None
    compress_piece(data)  # which allows no nan


def test_the_options_of_another_version_are_shown_as_they_are(tmp_path):
    run = make_run(tmp_path / "demo", 2)
    with (run / "config.yaml").open("a") as file:
        file.write("holodeck:\n  decks: 3\n")
    data = report_data(run)
    assert any("another version of rlsys" in text and "holodeck" in text for text in data["missing"])
    [unknown] = [o for o in data["options"] if o["name"] == "holodeck.decks"]
    assert (unknown["value"], unknown["default"], unknown["differs"]) == ("3", None, True)
    assert data["tables"] == {}


def test_the_state_of_a_run_follows_from_its_last_event(tmp_path):
    def kind(name, *events) -> str:
        return report_data(make_run(tmp_path / name, 2, events=events, saved=False))["state"]["kind"]

    assert kind("a") == "done"
    assert kind("b", ("stop", {"cause": "stop requested", "step": 2})) == "stopped"
    assert kind("c", ("stop", {"cause": "OSError: no space left"})) == "failed"
    assert kind("d", ("restart", {"cause": "Ray was lost"})) == "open"


# --- figures, lanes, settings -----------------------------------------------------------------------------------------


def test_every_figure_of_a_run_is_drawn_somewhere(tmp_path):
    run = make_run(tmp_path / "demo", 3)
    lines = read_lines(run / "metrics.jsonl")
    lines[-1] |= {
        "my/figure": 1.0,
        "eval/zigzag/pass@4": 0.5,
        "eval/zigzag/pass@4/low": 0.4,
        "eval/zigzag/pass@4/high": 0.6,
    }
    drawn = choose_charts(lines)
    names = [name for chart in drawn for name in chart["names"]]
    assert len(names) == len(set(names))
    [best] = [c for c in drawn if c["title"] == "Best of k, and votes"]
    assert best["bands"] == {"eval/zigzag/pass@4": ["eval/zigzag/pass@4/low", "eval/zigzag/pass@4/high"]}
    assert [c["names"] for c in drawn if c["section"] == "Everything else"] == [["my/figure"]]


def test_the_chart_of_equal_groups_is_for_group_relative_methods(tmp_path):
    def title(advantage: str) -> str:
        config = Config(algorithm=replace(Config().algorithm, advantage=advantage))
        drawn = page_data([ReportedRun.read(make_run(tmp_path / advantage, 2, config=config, saved=False))])["charts"]
        [chart] = [c for c in drawn if "groups/one_sample" in c["names"]]
        return chart["title"]

    assert title("grpo") == "Groups that teach nothing"
    assert title("reinforce_pp") == title("gae") == "groups/one_sample"


def test_every_chart_is_explained_in_a_sentence():
    for chart in (chart for members in SECTIONS.values() for chart in members):
        assert chart.caption.endswith("."), chart.title
        assert len(chart.caption) < 130, chart.title


def test_lanes_are_those_of_the_last_steps(tmp_path):
    lanes = worker_lanes(make_run(tmp_path / "demo", 12, saved=False))
    assert [(step, begin - BEGAN) for step, *_, begin in lanes["steps"]] == [(n, n) for n in range(7, 13)]
    busy = {w["name"]: w["busy"] for w in lanes["workers"]}
    assert list(busy) == ["driver", "policy-0", "rollout-0", "rollout-1"]
    assert busy["rollout-0"] == pytest.approx(0.5 / 0.95, abs=1e-3)
    [row] = lanes["workers"][0]["rows"]
    step, rollout = row[0], row[1]
    assert (lanes["names"][step[0]], step[1:4]) == ("step", [0.0, 950.0, 0])
    assert (lanes["names"][rollout[0]], rollout[1:4]) == ("rollout", [0.0, 500.0, 1])


def test_a_run_without_a_timeline_has_no_lanes_and_says_why(tmp_path):
    data = report_data(make_run(tmp_path / "demo", 2, timeline=False))
    assert data["lanes"] is None
    assert any("logs/*.spans" in text for text in data["missing"])


def test_settings_show_differences_from_the_defaults_with_meanings(tmp_path):
    options = {o["name"]: o for o in report_data(make_run(tmp_path / "demo", 7))["options"]}
    assert [name for name, o in options.items() if o["differs"]] == [
        "trainer.steps", "trainer.prompts_per_step", "trainer.samples_per_prompt",
    ]  # fmt: skip
    steps = options["trainer.steps"]
    assert (steps["value"], steps["default"], steps["meaning"]) == ("7", "100", "training steps, one batch each")


def test_secrets_are_hidden_wherever_they_come_from(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "very-secret-4711")
    text = "the key is very-secret-4711, or sk-abcdefghijklmnopqrstuv"
    run = make_run(tmp_path / "demo", 2, texts={1: text}, events=(("stop", {"cause": f"Error: {text}"}),))
    run_report(run)
    everything = json.dumps(read_pieces(run / "report.html"))
    assert "4711" not in everything
    assert "sk-abc" not in everything
    assert "the key is ***, or ***" in everything


def test_adjacent_secrets_do_not_join_texts(tmp_path):
    file = tmp_path / "step-000001.parquet"
    batch = make_batch(1, 1, 4, None)
    texts = ["see http://me:pass", "@here", "Bearer", "abcdefghijklmnopqrst\n\x00\n"]
    write_samples(file, replace(batch, samples=[replace(s, text=t) for s, t in zip(batch.samples, texts, strict=True)]))
    assert sample_texts(file)["text"] == texts


# --- samples ----------------------------------------------------------------------------------------------------------


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


# --- several runs -----------------------------------------------------------------------------------------------------


def test_two_runs_are_shown_side_by_side_with_differing_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a = make_run(tmp_path / "a", 4)
    changed = Config(policy=replace(Config().policy, lr=1e-4), trainer=replace(Config().trainer, steps=4))
    b = make_run(tmp_path / "b", 4, config=changed)
    assert "report-a-b.html" in run_report(a, b)
    data = read_pieces(tmp_path / "report-a-b.html")["main"]
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert {row["name"]: row["values"] for row in data["differences"]} == {
        "trainer.prompts_per_step": ["4", "32"],
        "trainer.samples_per_prompt": ["4", "16"],
        "policy.lr": ["1e-06", "0.0001"],
    }
    assert "A comparison has no samples" in data["left_out"]


def test_runs_with_the_same_name_are_shown_with_their_folders(tmp_path):
    runs = [ReportedRun.read(make_run(tmp_path / seed / "demo", 1)) for seed in ("x", "y")]
    assert [run["name"] for run in page_data(runs)["runs"]] == ["x/demo", "y/demo"]
    with pytest.raises(ConfigError, match="given twice"):
        page_data([runs[0], runs[0]])


# --- watch ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(tmp_path):
    """A run of four steps, `get(path, tag)` for status, body and tag, and the server that watches it."""
    run = make_run(tmp_path / "demo", 4)
    server = create_server(run, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def get(path: str, tag: str = "", address: str = "") -> tuple[int, bytes, str]:
        request = urllib.request.Request((address or server.address) + path, headers={"If-None-Match": tag})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                body = answer.read()
                return (
                    answer.status,
                    gzip.decompress(body) if answer.headers["Content-Encoding"] else body,
                    answer.headers["ETag"] or "",
                )
        except urllib.error.HTTPError as error:
            return error.code, error.read(), ""

    yield run, get, server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_served_page_has_no_data_and_may_only_ask_its_server(watched):
    _, get, server = watched
    status, body, _ = get("")
    text = body.decode()
    assert status == 200
    assert "connect-src 'self'" in text
    assert 'id="piece-' not in text
    assert server.server_address[0] == "127.0.0.1"


def test_nothing_is_served_without_the_key(watched):
    _, get, server = watched
    root = f"http://127.0.0.1:{server.port}/"
    for path in ("", "main", "wrong/main", f"{server.key}x/main"):
        status, body, _ = get(path, address=root)
        assert (status, b"whole line" in body) == (404, True)
    for path in ("texts-../config.yaml", "texts-step-9", "../main", "tokens-step-000099", "config.yaml"):
        assert get(path)[0] in (404, 400)


def test_unchanged_data_is_not_sent_again(watched):
    run, get, _ = watched
    status, body, tag = get("main")
    assert (status, json.loads(body)["runs"][0]["done"]) == (200, 4)
    assert get("main", tag)[:2] == (304, b"")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/mean": 0.5}\n')
    status, body, _ = get("main", tag)
    assert (status, json.loads(body)["runs"][0]["done"]) == (200, 5)


def test_new_and_rewritten_samples_are_sent(watched):
    run, get, _ = watched
    first = json.loads(get("numbers?after=0")[1])
    assert {f["name"] for f in first["files"]} == {
        "eval-000000",
        "eval-000004",
        *(f"step-00000{n}" for n in range(1, 5)),
    }
    assert json.loads(get(f"numbers?after={first['serial']}")[1])["files"] == []
    write_samples(run / "samples" / "step-000005.parquet", make_batch(5, 1, 2, None))
    write_samples(run / "samples" / "step-000004.parquet", make_batch(4, 1, 3, None))
    again = json.loads(get(f"numbers?after={first['serial']}")[1])["files"]
    assert sorted((f["name"], f["count"]) for f in again) == [("step-000004", 3), ("step-000005", 2)]


def test_a_damaged_file_is_reported_until_it_is_complete(watched):
    run, get, _ = watched
    file = run / "samples" / "step-000002.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    status, body, _ = get("numbers?after=0")
    first = json.loads(body)
    assert (status, len(first["files"])) == (200, 5)
    [named] = first["unread"]
    assert named.startswith("samples/step-000002.parquet cannot be read")
    file.write_bytes(whole)
    again = json.loads(get(f"numbers?after={first['serial']}")[1])
    assert [one["name"] for one in again["files"]] == ["step-000002"]
    assert again["unread"] == []


def test_files_of_samples_are_read_again_only_after_a_change(watched, monkeypatch):
    run, get, _ = watched
    read = []
    monkeypatch.setattr(
        "launch.report.watch.sample_numbers", lambda file: read.append(file.stem) or sample_numbers(file)
    )
    damage(run / "samples" / "step-000002.parquet", "cut")
    for _ in range(3):
        get("numbers?after=0")
    assert sorted(read) == sorted(file.stem for file in sample_files(run))


def test_texts_and_tokens_are_sent_on_request(watched):
    _, get, _ = watched
    assert len(json.loads(get("texts-step-000001")[1])["text"]) == 16
    assert EOS in json.loads(get("tokens-eval-000004")[1])["known"]


def test_a_removed_run_is_reported(watched):
    run, get, _ = watched
    run.rename(run.with_name("elsewhere"))
    status, body, _ = get("main", "old")
    assert (status, b"does not exist" in body) == (503, True)


def test_watch_refuses_a_path_to_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("about something else")
    for no_run in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match=r"is no run: it has no config.yaml"):
            create_server(no_run, 0)
    with pytest.raises(ConfigError, match=r"notes.txt is a file: no run can be in it"):
        create_server(tmp_path / "notes.txt" / "run", 0)


def test_a_port_that_is_taken_is_refused_with_a_way_out(watched):
    run, _, server = watched
    with pytest.raises(ConfigError, match=r"--port: \d+ on 127.0.0.1 cannot be used.*0 for any free one"):
        create_server(run, server.port)


@pytest.mark.parametrize("left", [None, (), (".lock", ".config.yaml.tmp")])
def test_watch_may_be_started_before_the_run(tmp_path, left):
    if left is not None:
        (tmp_path / "demo").mkdir()
        for name in left:
            (tmp_path / "demo" / name).touch()
    command = [sys.executable, "-m", "launch", "watch", "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        address = process.stdout.readline().removeprefix("demo: ").strip()
        process.stdout.readline()
        waits = process.stdout.readline().strip()
        assert waits == f"There is no run in {tmp_path}/demo yet; the page waits for it to begin."
        with urllib.request.urlopen(f"{address}main", timeout=20) as answer:
            assert (answer.status, answer.read().decode()) == (202, waits)
        make_run(tmp_path / "demo", 2)
        with urllib.request.urlopen(f"{address}main", timeout=20) as answer:
            assert json.loads(gzip.decompress(answer.read()))["runs"][0]["done"] == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_watch_prints_its_address_and_a_tunnel_and_ends_with_ctrl_c(tmp_path):
    run = make_run(tmp_path / "demo", 1)
    command = [sys.executable, "-m", "launch", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        first, way = process.stdout.readline(), process.stdout.readline()
        address = re.fullmatch(r"demo: (http://127\.0\.0\.1:(\d+)/[\w-]{16}/)\n", first)
        assert f"ssh -N -L {address[2]}:127.0.0.1:{address[2]} " in way
        with urllib.request.urlopen(address[1], timeout=20) as answer:
            assert b"<title>demo</title>" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert "The run is not affected." in process.stdout.read()


def test_recent_spans_are_read_from_the_end_of_the_files(tmp_path, monkeypatch):
    run = make_run(tmp_path / "demo", 400, saved=False)
    monkeypatch.setattr("rlsys.analysis.trace.BLOCK", 2000)
    newest = recorded(run, since=BEGAN + 395)
    assert len(newest) < len(recorded(run)) / 2
    assert [s for s in newest if s.end > BEGAN + 395] == [s for s in recorded(run) if s.end > BEGAN + 395]
    assert len(assign_lanes([s for s in newest if s.worker == "driver"], fits_inside)) == 1


def test_busy_time_does_not_depend_on_the_number_of_samples(tmp_path):
    run = make_run(tmp_path / "demo", 12, saved=False)
    few = worker_lanes(run)["workers"]
    large = [["zigzag:1#0", i, 0.3, 7] for i in range(60_000)]  # more than a MiB
    line = {"span": "generate", "at": BEGAN, "s": 0.5, "samples": large}
    engine = run / "logs" / "rollout-0.spans"
    write_lines(engine, [line | {"at": BEGAN + step} for step in range(1, 13)])
    assert [(w["name"], w["busy"]) for w in worker_lanes(run)["workers"]] == [(w["name"], w["busy"]) for w in few]
    lines = engine.read_text().splitlines(keepends=True)
    engine.with_suffix(".spans.before").write_text("".join(lines[:8]))
    engine.write_text("".join(lines[8:]))
    assert [w["busy"] for w in worker_lanes(run)["workers"]] == [w["busy"] for w in few], "its file was begun anew"


def test_steps_before_a_pause_are_not_shown(tmp_path):
    run = make_run(tmp_path / "demo", 8, saved=False)
    for file in (run / "logs").glob("*.spans"):
        later = [line | {"at": line["at"] + 12 * 3600 * (line["at"] >= BEGAN + 6)} for line in read_lines(file)]
        write_lines(file, later)
    lanes = worker_lanes(run)
    assert [step for step, *_ in lanes["steps"]] == [6, 7, 8]
    assert {w["name"]: w["busy"] for w in lanes["workers"]}["rollout-0"] == pytest.approx(0.5 / 0.95, abs=1e-3)


def test_non_finite_numbers_are_null_in_the_page(tmp_path):
    run = make_run(tmp_path / "demo", 1, prompts=1, samples=2, events=[("agreement", {"mean": math.nan})])
    ruin(run / "samples" / "step-000001.parquet")
    run_report(run)
    pieces = read_pieces(run / "report.html")
    assert pieces["numbers"][1]["advantage"] == [None, None]
    tokens = pieces["tokens-step-000001"]
    assert tokens["logprob"][0][:2] == tokens["gap"][0][:2] == [None, None]
    assert tokens["logprob"][0][2] < 0


def test_log_probs_are_kept_to_a_thousandth(tmp_path):
    run = make_run(tmp_path / "demo", 1, prompts=1, samples=1)
    file = run / "samples" / "step-000001.parquet"
    import pyarrow.parquet

    exact = pyarrow.parquet.read_table(file)["rollout_logprobs"][0].as_py()
    assert np.array(sample_tokens(file, None, None)["logprob"][0]) / 1000 == pytest.approx(exact, abs=5e-4 + 1e-9)
