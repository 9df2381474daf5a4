"""The timeline of a process."""

import asyncio
import json
import threading

import pytest
from fakes import make_sample
from machines import Machines

from launch.tools.analysis.trace import read_spans
from rlsys.runs import timeline
from rlsys.runs.directory import read_lines
from rlsys.runs.timeline import recorded, span


@pytest.fixture
def logs(tmp_path):
    timeline.open_timeline("policy-0", tmp_path)
    yield tmp_path
    timeline.close_timeline()


def lines(logs, name="policy-0"):
    return read_lines(logs / f"{name}.spans")


class Worker:
    @recorded(lambda _, packs, *others: {"packs": len(packs)})
    def update(self, packs, lr):
        if lr < 0:
            raise ValueError("no such rate")
        return "updated"

    @recorded()
    async def take(self):
        await asyncio.sleep(0.02)
        return "taken"

    @recorded()
    async def generate(self, groups):
        try:
            for samples in groups:
                yield samples
        finally:
            self.closed = True


def test_a_call_is_a_span_with_what_it_was_given(logs):
    assert Worker().update([1, 2], 0.1) == "updated"
    [line] = lines(logs)
    assert (line["span"], line["packs"]) == ("update", 2)
    assert line["s"] >= 0
    assert line["at"] > 1.7e9


def test_a_call_that_fails_is_a_span_too(logs):
    with pytest.raises(ValueError, match="no such rate"):
        Worker().update([], -1.0)
    assert [line["span"] for line in lines(logs)] == ["update"]


def test_a_coroutine_is_a_span_until_it_is_done(logs):
    assert asyncio.run(Worker().take()) == "taken"
    assert lines(logs)[0]["s"] >= 0.02


def test_a_stream_tells_when_each_sample_was_finished(logs):
    async def main():
        return [finished async for finished in Worker().generate([[make_sample(index=0)], [make_sample(index=1)]])]

    assert len(asyncio.run(main())) == 2
    [line] = lines(logs)
    assert [(uid, index, tokens) for uid, index, _, tokens in line["samples"]] == [("p", 0, 7), ("p", 1, 7)]
    ends = [end for _, _, end, _ in line["samples"]]
    assert 0 <= ends[0] <= ends[1] <= line["s"] + 2e-6, "both are rounded to a microsecond"


def test_a_stream_that_nobody_hears_to_its_end_is_closed_and_told(logs):
    worker = Worker()

    async def main():
        stream = worker.generate([[make_sample(index=i)] for i in range(3)])
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(main())
    assert worker.closed
    assert [len(line["samples"]) for line in lines(logs)] == [1]


def test_ray_sees_the_kind_of_function_that_was_written():
    import inspect

    assert inspect.isasyncgenfunction(Worker.generate)
    assert inspect.iscoroutinefunction(Worker.take)
    assert list(inspect.signature(Worker.update).parameters) == ["self", "packs", "lr"]


def test_what_is_learned_in_a_block_is_told_with_it(logs):
    with span("send", version=3) as facts:
        facts["bytes"] = 12
    [line] = lines(logs)
    assert (line["version"], line["bytes"]) == (3, 12)


def test_nothing_is_recorded_before_a_process_has_a_name(tmp_path):
    timeline.close_timeline()
    assert Worker().update([], 0.1) == "updated"
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_to_disturbs_nothing(tmp_path):
    timeline.open_timeline("policy-0", tmp_path / "of another host")
    assert Worker().update([], 0.1) == "updated"


def test_a_process_goes_on_behind_a_line_that_was_cut_off(logs):
    Worker().update([], 0.1)
    timeline.close_timeline()
    with (logs / "policy-0.spans").open("a") as file:
        file.write('\n{"span": "upd')
    timeline.open_timeline("policy-0", logs)
    Worker().update([], 0.1)
    assert [line["span"] for line in lines(logs)] == ["update", "update"]


def test_a_file_that_is_full_makes_room(logs, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_FILE_BYTES", 1000)
    for _ in range(100):
        Worker().update([], 0.1)
    sizes = {p.name: p.stat().st_size for p in logs.iterdir()}
    assert set(sizes) == {"policy-0.spans", "policy-0.spans.before"}
    assert max(sizes.values()) <= 1000
    assert lines(logs)


def test_threads_do_not_mix_their_lines(logs):
    threads = [threading.Thread(target=lambda: [Worker().update([1], 0.1) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = [text for text in (logs / "policy-0.spans").read_text().splitlines() if text]
    assert len([json.loads(text) for text in texts]) == 200


def test_the_driver_tells_its_steps_and_their_phases(tmp_path):
    machines = Machines(tmp_path, reference=True).run()
    spans = read_spans(machines.run_directory.path)
    assert {s.worker for s in spans} == {"driver"}
    steps = [s for s in spans if s.name == "step"]
    assert [s.facts["step"] for s in steps] == [1, 2, 3]
    for step in steps:
        phases = [
            s.name
            for s in spans
            if step.start <= s.start <= step.end and s.name in ("rollout", "score", "update", "sync")
        ]
        assert list(dict.fromkeys(phases)) == ["rollout", "score", "update", "sync"]
    assert len([s for s in spans if s.name == "write_samples"]) == 6  # three steps, three evaluations
