"""The page of a run that goes on, in a real Chromium."""

import contextlib
import threading

from browsing import result_text, search, wait_for_text
from made_run import BEGAN, damage, figures, make_batch, make_run, write_lines, write_timeline
from reports import make_report

from launch.tools.report.watch import create_server
from rlsys.runs.directory import read_lines
from rlsys.runs.samples import write_samples


@contextlib.contextmanager
def watched(run):
    server = create_server(run, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_watched_run_grows_without_closing_the_open_group(open_page, tmp_path):
    run = make_run(tmp_path / "going", 4, events=(("sync", {"version": 4}),))
    with watched(run) as server:
        page = open_page(server.address)
        assert page.locator("#state").inner_text() == "not finished"
        search(page, step="2", set="step")
        page.keyboard.press("Escape")
        row = page.locator(".list .row").nth(2)
        row.click()
        wait_for_text(page, "#opened", row.get_attribute("data-uid"))
        opened = page.locator(".prompt").inner_text()
        page.locator('.card[data-names="entropy"] svg').focus()
        page.keyboard.press("ArrowLeft")
        write_samples(run / "samples" / "step-000005.parquet", make_batch(5, 4, 4, None))
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "reward/mean": 0.99, "entropy": 0.1, "time/step": 0.6}\n')
        with (run / "events.jsonl").open("a") as file:
            file.write(f'{{"time": {BEGAN + 60}, "event": "done", "step": 5}}\n')
        wait_for_text(page, "#state", "done")
        assert page.locator(".tile b").first.inner_text() == "5"
        assert page.locator(".prompt").inner_text() == opened
        assert page.locator('.filters [name="step"]').input_value() == "2"
        assert "values of step 3" in page.locator("#told-step").inner_text()
        assert search(page, step="5") == "16 samples in 4 groups"
        wait_for_text(page, "#opened", "training, step 5")
        server.watched.path = tmp_path / "nowhere"
        wait_for_text(page, "#live", "such as runs/demo. The page stays as it is and tries again.")


def test_a_new_metric_keeps_smoothing_and_open_sections(open_page, tmp_path):
    run = make_run(tmp_path / "figures", 12)
    lines = read_lines(run / "metrics.jsonl")
    write_lines(run / "metrics.jsonl", [line | {"my/first": 1.0} for line in lines])
    with watched(run) as server:
        page = open_page(server.address)
        page.get_by_label("smoothing").select_option("0.9")
        page.get_by_text("Everything else: 1 metric").click()
        write_lines(run / "metrics.jsonl", [line | {"my/first": 1.0, "my/second": 2.0} for line in lines])
        wait_for_text(page, "#curves", "Everything else: 2 metrics")
        assert page.get_by_label("smoothing").input_value() == "0.9"
        assert page.locator('.card[data-names="reward/mean"] svg path[fill="none"]').count() == 2
        assert page.locator('.card[data-names="my/second"] svg path').count() >= 1


def test_the_chosen_step_of_the_lanes_is_kept_or_the_newest_followed(open_page, tmp_path):
    run = make_run(tmp_path / "lanes", 8, saved=False)

    def goes_on(step):
        write_timeline(run / "logs", step)
        write_lines(run / "metrics.jsonl", [figures(s, step, evaluated=False) for s in range(1, step + 1)])
        wait_for_text(page, "#time .tools", f"step {step}")

    with watched(run) as server:
        page = open_page(server.address)
        chosen = page.locator('#time .tools [aria-pressed="true"]')
        page.get_by_role("button", name="step 5").click()
        goes_on(9)
        assert chosen.inner_text() == "step 5"
        goes_on(11)
        assert chosen.inner_text() == "step 11", "5 is not among the last six any more"
        goes_on(12)
        assert chosen.inner_text() == "step 12"
        page.get_by_role("button", name="all", exact=True).click()
        goes_on(13)
        assert chosen.inner_text() == "all"


def test_the_page_waits_for_a_run_that_has_not_started(open_page, tmp_path):
    with watched(tmp_path / "later") as server:
        page = open_page(server.address)
        waits = page.locator("#wait")
        assert waits.inner_text() == f"There is no run in {tmp_path}/later yet; the page waits for it to begin."
        assert page.locator("#title").inner_text() == "later"
        assert "waiting" in page.locator("#live").inner_text()
        make_run(tmp_path / "later", 4)
        wait_for_text(page, "#state", "done")
        wait_for_text(page, "#found", "18 samples in 6 groups")
        wait_for_text(page, "#live", "watching")
        assert not waits.is_visible()


def test_samples_written_after_the_metrics_of_their_step_are_shown(open_page, tmp_path):
    run = make_run(tmp_path / "behind", 4)
    with watched(run) as server:
        page = open_page(server.address)
        assert search(page, step="4", set="eval") == "2 samples in 2 groups"
        write_samples(run / "samples" / "eval-000004.parquet", make_batch(4, 3, 1, None))
        wait_for_text(page, "#found", "3 samples in 3 groups")


def test_a_failed_piece_is_fetched_again(open_page, tmp_path):
    run = make_run(tmp_path / "hiccup", 4)
    with watched(run) as server:
        numbers, requests = server.watched.numbers, []

        def first_fails(after):
            requests.append(after)
            if len(requests) == 1:
                raise OSError("the disk is away")
            return numbers(after)

        server.watched.numbers = first_fails
        page = open_page(server.address)
        assert "the disk is away" in page.locator("#live").inner_text()
        wait_for_text(page, "#found", "18 samples in 6 groups")
        wait_for_text(page, "#live", "watching")


def test_the_page_reports_damaged_samples_until_they_are_complete(open_page, tmp_path):
    run = make_run(tmp_path / "damaged", 4)
    file = run / "samples" / "step-000004.parquet"
    whole = file.read_bytes()
    damage(file, "cut")
    page = open_page(make_report(run))
    assert "samples/step-000004.parquet cannot be read" in page.locator("#summary .missing").inner_text()
    assert result_text(page) == "2 samples in 2 groups", "the evaluation of that step"
    with watched(run) as server:
        page = open_page(server.address)
        assert "samples/step-000004.parquet cannot be read" in page.locator("#unread").inner_text()
        assert result_text(page) == "2 samples in 2 groups"
        file.write_bytes(whole)
        wait_for_text(page, "#found", "18 samples in 6 groups")
        assert page.locator("#unread").inner_text() == ""


def test_the_search_skips_unreadable_texts(open_page, tmp_path):
    run = make_run(tmp_path / "hollow", 4, texts={2: "a word", 3: "a word"})
    damage(run / "samples" / "step-000002.parquet", "hollow")
    with watched(run) as server:
        page = open_page(server.address)
        search(page, step="")
        assert search(page, words="a word") == "1 sample in 1 group. The texts of step-000002 cannot be read."
        search(page, words="", step="2")
        wait_for_text(page, "#opened", "This group cannot be shown now")
