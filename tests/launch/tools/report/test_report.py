"""The data of the page, from a run directory to one file. The page itself is tested in test_report_page."""

import base64
import json
import math
import os
import re
import tomllib
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from made_run import make_batch, make_run, ruin, write_lines
from reports import read_pieces, report_data, run_report

from launch.tools.report.charts import SECTIONS, choose_charts
from launch.tools.report.gather import ReportedRun, page_data
from launch.tools.report.page import HERE, SCRIPTS, inline_script
from launch.tools.report.sample_pieces import (
    compress_piece,
    sample_texts,
)
from launch.tools.rescore.inputs import load_settings
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.runs.directory import read_lines
from rlsys.runs.samples import write_samples

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
    project = tomllib.loads((HERE.parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = project["package-data"]["launch.tools.report"]
    root = HERE.parents[2]
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


# --- figures and settings ---------------------------------------------------------------------------------------------


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


def test_episodes_have_charts_of_their_own_and_runs_without_any_have_none(tmp_path):
    lines = read_lines(make_run(tmp_path / "demo", 3) / "metrics.jsonl")
    assert "Episodes" not in {chart["section"] for chart in choose_charts(lines)}
    own = {"turns": 3.0, "observed_tokens": 9.0, "finish/stop": 0.5, "finish/turns": 0.5, "finish/window": 0.0}
    own |= {"tool_calls": 2.0, "tool_calls/add": 1.0, "unreadable_calls": 0.5}
    names = [f"{place}episode/{name}" for place in ("", "eval/zigzag/") for name in own]
    lines[-1] |= dict(zip(names, [*own.values()] * 2, strict=True))
    charts = [chart for chart in choose_charts(lines) if set(names) & set(chart["names"])]
    assert {chart["section"] for chart in charts} == {"Episodes"}
    assert sorted(name for chart in charts for name in chart["names"]) == sorted(names), "each once"


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


def test_non_finite_numbers_are_null_in_the_page(tmp_path):
    run = make_run(tmp_path / "demo", 1, prompts=1, samples=2, events=[("agreement", {"mean": math.nan})])
    ruin(run / "samples" / "step-000001.parquet")
    run_report(run)
    pieces = read_pieces(run / "report.html")
    assert pieces["numbers"][1]["advantage"] == [None, None]
    tokens = pieces["tokens-step-000001"]
    assert tokens["logprob"][0][:2] == tokens["gap"][0][:2] == [None, None]
    assert tokens["logprob"][0][2] < 0


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


HOSTILE_CONFIGS = {  # options of a shared run, written by somebody who wants to know the reader's environment
    "model: {path: '${oc.env:TEAM_DB_URL}'}": "${oc.env:TEAM_DB_URL}",
    "model: {path: '${oc.env:TEAM_DB_URL,nothing}'}": "${oc.env:TEAM_DB_URL}",
    "model: {path: '${oc.decode:${oc.env:TEAM_DB_URL}}'}": "",
    "model: {path: '${oc.create:${oc.env:TEAM_DB_URL}}'}": "",
    'model: {path: "\\0oc.env:TEAM_DB_URL\\0"}': "",
    "trainer: {steps: '${oc.env:TEAM_DB_URL}'}": "",
    "nothing: {of: '${oc.env:TEAM_DB_URL}'}": "",
    "data: {train: {'${oc.env:TEAM_DB_URL}': {path: '${oc.env:TEAM_DB_URL}'}}}": "",
    'data: {train: {"\\0oc.env:TEAM_DB_URL\\0": {}}}': "",
    "reward: {functions: {judge: {url: '${oc.env:TEAM_DB_URL}', template: '${oc.env:TEAM_DB_URL}'}}}": "",
    "tracking: {to: {wandb: {project: '${oc.env:TEAM_DB_URL}'}}}": "",
    "cluster: {address: '${oc.env:TEAM_DB_URL}', env: {'${oc.env:TEAM_DB_URL}': '${oc.env:TEAM_DB_URL}'}}": "",
    "run: {dir: '${model.path}'}\nmodel: {path: 'a ${oc.env:TEAM_DB_URL} b'}": "a ${oc.env:TEAM_DB_URL} b",
}


@pytest.mark.parametrize("text", HOSTILE_CONFIGS)
def test_a_run_of_somebody_else_does_not_learn_the_readers_environment(tmp_path, monkeypatch, text):
    value = "postgres-of-the-reader-4711"
    monkeypatch.setenv("TEAM_DB_URL", value)
    run = make_run(tmp_path / "run", steps=2)
    (run / "config.yaml").write_text(text)
    read = ReportedRun.read(run)
    page = json.dumps(page_data([read]), default=str)
    assert value not in page + str(read.options) + str(read.config)
    if shown := HOSTILE_CONFIGS[text]:
        assert read.options["model.path"] == shown
        assert shown in page
    try:
        settings = repr(load_settings(str(run), {}, ()))
    except ConfigError as error:
        settings = str(error)
    assert value not in settings
    monkeypatch.delenv("TEAM_DB_URL")
    assert json.dumps(page_data([ReportedRun.read(run)]), default=str) == page, "nor whether a variable is set"
