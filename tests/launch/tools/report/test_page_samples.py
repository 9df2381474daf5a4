"""The samples of the page in a real Chromium: filters, searches, tokens and keys."""

import re
from dataclasses import replace

import numpy as np
from browsing import expect, result_text, rows, search, wait_for_text
from made_run import make_batch, make_run, ruin
from reports import make_report

from launch.tools.report.command import collect_samples
from launch.tools.report.gather import ReportedRun
from rlsys.runs.samples import write_samples


def test_the_newest_step_is_open_at_first(open_page, demo):
    page = open_page(demo)
    assert result_text(page) == "18 samples in 6 groups"  # 4 groups of 4, and two held-out prompts
    assert rows(page)[0].startswith("zigzag:1#")
    assert page.locator(".completion").count() == 4


def test_filters_narrow_what_is_listed(open_page, demo):
    page = open_page(demo)
    assert search(page, step="") == "200 samples in 56 groups"  # 12 x 16 and 4 x 2
    assert search(page, step="5") == "16 samples in 4 groups"
    assert search(page, least="0.5") != "16 samples in 4 groups"
    assert all("5 ·" in row for row in rows(page))
    page.get_by_role("button", name="clear all").click()
    assert search(page, step="3-4", set="step") == "32 samples in 8 groups"
    assert search(page, finish="length").endswith("groups")
    assert page.locator(".completion:not(.out)").get_by_text("cut").count() >= 1
    assert search(page, shortest="99") == "No sample matches."


def test_equal_rewards_take_at_least_two_samples(open_page, demo):
    page = open_page(demo)
    equal = search(page, step="4", spread="none", set="eval")
    assert equal == "No sample matches.", "one sample each"
    assert search(page, spread="some") == equal
    search(page, step="", set="step", spread="none")
    counts = [int(re.search(r"in (\d+) groups?", search(page, spread=which))[1]) for which in ("none", "some", "")]
    assert counts[0] + counts[1] == counts[2] == 48


def test_a_group_with_zero_advantages_teaches_nothing(open_page, tmp_path):
    run = make_run(tmp_path / "equal", 2, prompts=1, samples=2)
    for step, advantage in ((1, 0.0), (2, 0.5)):
        batch = replace(make_batch(step, 1, 2, None), rewards=np.ones(2, np.float32))
        write_samples(run / "samples" / f"step-{step:06d}.parquet", batch, np.full(2, advantage, np.float32))
    page = open_page(make_report(run))
    search(page, step="1", set="step")
    wait_for_text(page, "#opened", "equal rewards: it teaches nothing")
    search(page, step="2")
    wait_for_text(page, "#opened", "training, step 2")
    assert "equal rewards" in page.locator("#opened").inner_text()
    assert "teaches nothing" not in page.locator("#opened").inner_text()


def test_the_search_covers_all_texts(open_page, demo):
    page = open_page(demo)
    search(page, step="")
    assert search(page, words="right to left") == "1 sample in 1 group"
    assert "7 ·" in rows(page)[0]
    page.get_by_role("button", name="plain text").click()
    assert page.locator(".said mark").inner_text() == "right to left"


def test_hostile_text_is_shown_and_does_nothing(open_page, demo):
    page = open_page(demo)
    search(page, step="7")
    page.get_by_role("button", name="plain text").click()
    completion = page.locator(".completion .said").first
    wait_for_text(page, ".said >> nth=0", "onerror")
    text = completion.inner_text()
    assert text.startswith("</script><img src=x onerror=")
    assert "‹U+0000›‹U+001B›[31m‹U+202E›right to left‹U+202C› 😀 &lt;b&gt; مرحبا" in text
    assert page.title() == "demo"
    assert page.locator("main img").count() == 0
    assert completion.evaluate("e => getComputedStyle(e).unicodeBidi") == "isolate"


def test_tokens_are_colored_by_log_prob_advantage_and_gap(open_page, demo):
    page = open_page(demo)
    tokens = page.locator(".completion").first.locator(".t")
    assert tokens.last.inner_text() == "<eos>"
    assert re.search(
        r'^"<eos>" · token 1 · log-prob -[\d.]+ · policy − rollout [\d.e-]+ · advantage .*$',
        tokens.last.get_attribute("title"),
    )
    strengths = {t.get_attribute("style") for t in tokens.all()}
    assert len(strengths) > 1
    assert all("--prob" in s for s in strengths)
    page.get_by_role("button", name="advantage", exact=True).click()
    wait_for_text(page, "#colors", "the advantage of each token")
    assert len({t.get_attribute("style") for t in tokens.all()}) == 1, "each token has its sample's advantage"
    page.get_by_role("button", name="policy − rollout").click()
    assert "the difference should be rounding only" in page.locator("#colors").inner_text()


def test_non_finite_numbers_stand_out(open_page, tmp_path):
    run = make_run(tmp_path / "diverged", 1, prompts=1, samples=2)
    ruin(run / "samples" / "step-000001.parquet")
    page = open_page(make_report(run))
    search(page, set="step")
    first = page.locator(".completion").first
    assert "advantage not finite" in first.inner_text()
    assert first.locator(".t.broken").count() == 2
    assert "log-prob not finite" in first.locator(".t").first.get_attribute("title")
    page.get_by_role("button", name="policy − rollout").click()
    wait_for_text(page, "#colors", "the difference should be rounding only")
    assert first.locator(".t.broken").count() == 2


def test_the_page_says_why_tokens_cannot_be_colored(open_page, demo):
    page = open_page(demo)
    search(page, set="eval", step="12")
    page.get_by_role("button", name="policy − rollout").click()
    assert "neither evaluations nor a single update" in page.locator("#colors").inner_text()


def test_groups_and_steps_are_walked_with_the_keyboard(open_page, demo):
    page = open_page(demo)
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "words"
    page.keyboard.press("Escape")

    def current():
        return page.locator('.row[aria-current="true"]').get_attribute("data-uid")

    first = current()
    page.keyboard.press("j")
    assert current() != first
    page.keyboard.press("ArrowUp")
    assert current() == first
    page.keyboard.press("[")
    wait_for_text(page, "#opened", "step 11")
    assert result_text(page) == "16 samples in 4 groups"
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()


def test_the_keyboard_reaches_groups_beyond_the_first_page(open_page, tmp_path):
    page = open_page(make_report(make_run(tmp_path / "many", 1, prompts=160, samples=1)))
    search(page, set="step")
    page.locator(".list .row").nth(149).click()
    page.keyboard.press("j")
    current = page.locator('.row[aria-current="true"]')
    assert current.get_attribute("data-uid") == "zigzag:151#0"
    expect(current).to_be_focused()
    page.keyboard.press("ArrowDown")
    assert current.get_attribute("data-uid") == "zigzag:152#0"


def test_the_same_prompt_is_found_at_other_steps(open_page, demo):
    page = open_page(demo)
    search(page, step="12", set="step")
    steps = page.locator("#alike button")
    assert [b.inner_text().split()[0] for b in steps.all()] == [str(n) for n in range(1, 13)]
    steps.first.click()
    wait_for_text(page, "#opened", "training, step 1zigzag")
    assert page.locator("#alike button").first.get_attribute("aria-pressed") == "true"


def test_the_page_says_which_texts_are_left_out(open_page, tmp_path):
    run = make_run(tmp_path / "cut", 12)
    cut = next(
        one
        for one in collect_samples(ReportedRun.read(run), 3_000).numbers
        if one["kind"] == "step" and not one["kept"]
    )
    page = open_page(f"{make_report(run, megabytes=3_000 / (1 << 20)).as_uri()}#samples?step={cut['step']}&set=step")
    assert re.search(r"Texts and tokens of \d+ of \d+ groups are in this file", page.locator("#left-out").inner_text())
    wait_for_text(page, "#opened", "The texts of this group are not in this file; its numbers are.")
    assert page.locator(".completion").count() == 4
    assert "reward" in page.locator(".completion").first.inner_text()
