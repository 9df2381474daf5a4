"""A browser, and the report of a run in which much happens."""

import shutil
from dataclasses import replace

import pytest
from browsing import HOSTILE
from made_run import make_batch, make_run, write_lines
from reports import make_report

from rlsys.runs.directory import read_lines
from rlsys.runs.samples import write_samples
from rlsys.types import Verdict

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")

EVENTS = (
    ("sync", {"version": 2}),
    ("replaced", {"worker": "rollout-1", "cause": "it was killed"}),
    ("done", {"step": 12}),
)


@pytest.fixture(scope="module")
def browser():
    """Chromium. Without it, tests of the page are skipped."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
    if not CHROMIUM:
        pytest.skip("needs a Chromium: on Debian, apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """`open_page(file)` opens a page; any error of the page fails the test."""
    complaints: list[str] = []
    contexts = []

    def open_page(file, width=1400, dark=False, **how):
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            **how,
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" and "503" not in m.text else None)
        page.on(
            "request",
            lambda r: complaints.append(r.url) if not r.url.startswith(("file:", "http://127.0.0.1")) else None,
        )
        page.goto(file.as_uri() if hasattr(file, "as_uri") else file)
        page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Twelve steps: an engine was replaced in step 3, two verdicts failed in step 5, a text of step 7 is hostile."""
    run = make_run(tmp_path_factory.mktemp("page") / "demo", 12, events=EVENTS, texts={7: HOSTILE})
    lines = read_lines(run / "metrics.jsonl")
    lines[5] |= {"reward/failed": 2.0, "failure/timeout": 2.0}
    write_lines(run / "metrics.jsonl", lines)
    batch = make_batch(5, 4, 4, None)
    failed = [(s, Verdict(None, failure="timeout", detail="no verdict after 10 s")) for s in batch.samples[4:6]]
    keep = [i for i in range(16) if i not in (4, 5)]
    write_samples(
        run / "samples" / "step-000005.parquet",
        replace(
            batch,
            samples=[batch.samples[i] for i in keep],
            groups=batch.groups[keep],
            rewards=batch.rewards[keep],
            components=[batch.components[i] for i in keep],
            failed=failed,
        ),
        batch.rewards[keep],
    )
    return make_report(run)
