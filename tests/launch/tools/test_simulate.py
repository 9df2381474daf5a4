"""The simulator against steps that can be computed by hand."""

import dataclasses
import itertools
import json
from typing import ClassVar

import pytest

from launch.tools.analysis.trace import Span
from launch.tools.plan import costs, simulated_workers
from launch.tools.plan.simulate import SimulatedLoop
from launch.tools.plan.simulated_workers import Costs, SimulatedEngine
from launch.tools.synthetic import CompletionLengths
from rlsys.config import loading
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.models.lookup import pairs_per_token
from rlsys.sampling.oversampling import PromptGroup

FREE = Costs(step_s=0.0, sequence_s=0.0, prompt_s=0.0, score_s=0.0, update_s=0.0)


def configured(*overrides: str) -> Config:
    options = ["trainer.prompts_per_step=4", "trainer.samples_per_prompt=2", "rollout.engines=2", "policy.ranks=1"]
    return loading.build_config(loading.OmegaConf.create(), [*options, *overrides], "")


def report(*overrides: str, steps: int = 4, mean: float = 10, longest: int = 10, **seconds: float):
    config = configured(f"rollout.max_new_tokens={longest}", *overrides)
    return SimulatedLoop(config, dataclasses.replace(FREE, **seconds), CompletionLengths(mean, longest), 5).run(steps)


def test_a_step_on_policy_is_the_sum_of_its_parts():
    simulation = report(
        step_s=1.0, sequence_s=0.5, prompt_s=0.1, optimizer_s=7.0, sync_s=2.0, reward_s=0.25, other_s=0.5
    )
    # Each engine has two prompts of 5 tokens and 4 sequences of 10.
    rollout = 2 * 5 * 0.1 + 10 * (1.0 + 4 * 0.5)
    assert [s.seconds for s in simulation.steps] == pytest.approx([rollout + 0.25 + 0.5 + 7.0 + 2.0] * 4)
    assert simulation.lag == 0
    assert simulation.engines_idle(2) == pytest.approx(1 - rollout / simulation.seconds)
    assert simulation.sequences_per_engine(2) == pytest.approx(4 * rollout / simulation.seconds)
    assert simulation.ranks_idle == pytest.approx(1 - 9.0 / simulation.seconds)
    assert simulation.samples_per_second == pytest.approx(8 / simulation.seconds)


def test_one_step_ahead_the_longer_of_both_sides_counts():
    simulation = report("pipeline.max_lag=1", step_s=1.0, optimizer_s=7.0, sync_s=2.0)
    assert [s.seconds for s in simulation.steps] == pytest.approx([10.0 + 2.0] * 4)
    assert [s.lag for s in simulation.steps] == [1] * 4
    simulation = report("pipeline.max_lag=1", step_s=1.0, optimizer_s=17.0, sync_s=2.0)
    assert [s.seconds for s in simulation.steps] == pytest.approx([17.0 + 2.0] * 4)


def test_a_sync_in_flight_delays_samples_only():
    simulation = report(
        "pipeline.max_lag=1", "pipeline.in_flight=true", step_s=1.0, optimizer_s=3.0, sync_s=2.0, steps=6
    )
    assert simulation.seconds == pytest.approx(10.0 + 2.0)
    assert simulation.engines_idle(2) <= 2.0 / 12 + 1e-9


def test_more_sequences_than_an_engine_decodes_wait_for_their_turn():
    simulation = report("rollout.max_sequences=2", step_s=1.0)
    assert simulation.seconds == pytest.approx(2 * 10.0)


def test_over_sampling_shortens_the_wait_for_the_longest():
    ragged = {"mean": 30, "longest": 400, "step_s": 1.0, "steps": 12}
    lag = ["trainer.prompts_per_step=16", "pipeline.max_lag=2", "pipeline.in_flight=true"]
    without, more = report(*lag, **ragged), report(*lag, "rollout.oversample=0.5", **ragged)
    assert more.samples_per_second > 1.3 * without.samples_per_second
    assert more.engines_idle(2) < without.engines_idle(2)
    assert more.lag <= 2


@pytest.mark.parametrize("oversample", [0.1, 0.25, 0.5])
def test_over_sampling_keeps_engines_busy_for_nine_tenths_of_the_time(oversample):
    options = ["trainer.prompts_per_step=32", "trainer.samples_per_prompt=8", "rollout.engines=4"]
    options += ["pipeline.max_lag=2", "pipeline.in_flight=true"]
    tail = {"mean": 300, "longest": 3000, "step_s": 1.0, "steps": 12}
    assert report(*options, **tail).engines_idle(4) > 0.15
    simulation = report(*options, f"rollout.oversample={oversample}", **tail)
    assert simulation.engines_idle(4) <= 0.1
    assert simulation.sequences_per_engine(4) > 1.5 * report(*options, **tail).sequences_per_engine(4)


def test_over_sampling_checks_its_groups_a_few_times_only(monkeypatch):
    looks, complete = itertools.count(), PromptGroup.complete.fget
    monkeypatch.setattr(PromptGroup, "complete", property(lambda group: next(looks) >= 0 and complete(group)))
    options = ["trainer.prompts_per_step=256", "trainer.samples_per_prompt=4", "rollout.engines=16"]
    simulation = report(*options, "pipeline.max_lag=2", "rollout.oversample=0.25", mean=30, longest=400, step_s=1.0)
    assert len(simulation.steps) == 4
    assert next(looks) < 10 * 7 * 320 * 4, "7 steps in all, of 320 groups of 4"


def test_updates_cost_what_their_tokens_do():
    simulation = report("algorithm.normalize=token_mean", update_s=1.0)
    assert simulation.seconds == pytest.approx(4 * (5 + 2 * 9), rel=0.02)  # a prompt once for its two samples


def test_a_critic_scores_every_batch_and_learns_before_the_policy():
    policy_only = report(score_s=1.0, update_s=10.0, optimizer_s=5.0)
    with_critic = report("algorithm.advantage=gae", score_s=1.0, update_s=10.0, optimizer_s=5.0)
    computed = (policy_only.seconds - 5.0) / 10
    assert computed == pytest.approx(4 * (5 + 2 * 9), rel=0.05)
    assert with_critic.seconds == pytest.approx(computed + 2 * policy_only.seconds)


def test_the_same_simulation_gives_the_same_figures():
    once, again = (
        report("pipeline.max_lag=1", mean=30, longest=400, step_s=1.0, sequence_s=0.1, optimizer_s=20.0) for _ in "ab"
    )
    assert once == again


def spans_of(known: Costs) -> list[Span]:
    spans = [Span("driver", "step", 0.0, 100.0, {"step": 1})]
    for number, lengths in enumerate(([4, 8, 10], [3, 7, 30], [20, 21, 22])):
        for prompts in (1, 3):
            samples = []
            for i, n in enumerate(lengths):
                worked = sum(min(m, n) for m in lengths)
                at = n * known.step_s + worked * known.sequence_s + prompts * 5 * known.prompt_s
                samples.append([f"p{i % prompts}", i, at, n])
            requests = [[uid, index, 0] for uid, index, *_ in samples]
            facts = {"requests": requests, "samples": samples}
            spans.append(Span(f"rollout-{number}-{prompts}", "generate", 1.0, samples[-1][2], facts))
    spans.append(Span("critic-0", "update", 1.0, 50.0, {"packs": 1, "tokens": 1, "pairs": 0}))
    spans.append(Span("critic-0", "score", 1.0, 50.0, {"packs": 1, "tokens": 1, "pairs": 0}))
    for packs, tokens, attention in ((1, 100, 0), (2, 300, 5), (4, 350, 80), (4, 300, 200)):
        pairs = attention * pairs_per_token("builtin:tiny")
        seconds = known.optimizer_s + packs * known.pack_s + (tokens + attention) * known.update_s
        spans.append(Span("policy-0", "update", 1.0, seconds, {"packs": packs, "tokens": tokens, "pairs": pairs}))
    return spans


def test_costs_are_recovered_from_a_timeline(tmp_path):
    known = Costs(
        0.02,
        0.001,
        0.0005,
        score_s=0.001,
        update_s=0.003,
        pack_s=0.01,
        optimizer_s=0.2,
        sync_s=0.5,
        reward_s=0.1,
        other_s=0.4,
    )
    line = {
        "time/sync": 0.5,
        "step": 1.0,
        "time/step": 100.0,
        "time/rollout": 98.0,
        "time/reward": 0.1,
        "time/score": 0.5,
        "time/update": 0.5,
    }
    fitted = costs.fit_costs(spans_of(known), [line], configured("rollout.max_sequences=4"), prompt_tokens=5)
    assert dataclasses.asdict(fitted) == pytest.approx(dataclasses.asdict(known))
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text("rollout: {max_sequences: 4}")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    for s in spans_of(known):
        text = json.dumps({"span": s.name, "at": s.start, "s": s.seconds} | s.facts)
        with (tmp_path / "logs" / f"{s.worker}.spans").open("a") as file:
            file.write(text + "\n")
    assert dataclasses.asdict(costs.read_costs(tmp_path, 5)) == pytest.approx(dataclasses.asdict(known))


class RecordedEngine(SimulatedEngine):
    """With a span for each stream, as a worker's."""

    every: ClassVar[list["RecordedEngine"]] = []

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.streams, self.stream_of = [], {}
        self.every.append(self)
        self.name = f"rollout-{len(self.every)}"

    def add(self, requests, now):
        rows = [[r.uid, r.index, 0] for r in requests]
        self.streams.append(Span(self.name, "generate", now, 0.0, {"requests": rows, "samples": []}))
        self.stream_of |= {(r.uid, r.index): self.streams[-1] for r in requests}
        super().add(requests, now)

    def finish(self, now):
        done = super().finish(now)
        for r, _ in done:
            stream = self.stream_of[r.uid, r.index]
            stream.facts["samples"].append([r.uid, r.index, now - stream.start, r.max_new_tokens])
        return done


@pytest.mark.parametrize(("engines", "slots"), [(1, 128), (1, 64), (1, 32), (2, 32), (4, 8)])
def test_costs_of_engines_are_recovered_with_any_number_of_slots(monkeypatch, engines, slots):
    known = {"step_s": 0.02, "sequence_s": 0.001, "prompt_s": 0.0005}
    options = [f"rollout.engines={engines}", f"rollout.max_sequences={slots}", "trainer.prompts_per_step=16"]
    options += ["trainer.samples_per_prompt=8"]
    real = {"mean": 60, "longest": 128}
    monkeypatch.setattr(simulated_workers, "SimulatedEngine", RecordedEngine)
    monkeypatch.setattr(RecordedEngine, "every", [])
    seconds = report(*options, **real, **known).seconds
    spans = [s for engine in RecordedEngine.every for s in engine.streams]
    fitted = dict(zip(known, costs.fit_engine(spans, slots, 5), strict=True))
    assert report(*options, **real, **fitted).seconds == pytest.approx(seconds, rel=0.02)
    assert fitted == pytest.approx(known, rel=0.1)


def test_tokens_of_a_partial_sample_are_prefilled_and_not_decoded():
    def going_on(engine: int, begun: int, drawn: int) -> Span:
        facts = {"requests": [["p", 0, begun]], "samples": [["p", 0, 2.0 * drawn + 0.1 * (5 + begun), begun + drawn]]}
        return Span(f"rollout-{engine}", "generate", 7.0, 100.0, facts)

    step_s, sequence_s, prompt_s = costs.fit_engine([going_on(0, 20, 10), going_on(1, 3, 40)], 4, 5)
    assert (step_s + sequence_s, prompt_s) == pytest.approx((2.0, 0.1))


def test_a_timeline_without_engines_is_refused():
    steps = [
        Span("driver", "step", 0.0, 1.0, {"step": 1}),
        Span("policy-0", "update", 0.5, 0.2, {"tokens": 9, "packs": 1}),
    ]
    line = {"step": 1.0, "time/step": 1.0} | {f"time/{name}": 0.1 for name in costs.PHASES}
    with pytest.raises(ConfigError, match=r"timeline of the engines, and there is none .* logs/NAME\.spans"):
        costs.fit_costs(steps, [line], configured(), prompt_tokens=5)


@pytest.mark.parametrize("max_lag", [2, 3])
def test_a_report_covers_whole_periods_between_syncs(max_lag):
    means = {
        n: report(f"pipeline.max_lag={max_lag}", steps=n, step_s=1.0, optimizer_s=3.0).seconds for n in (4, 5, 6, 7)
    }
    assert len({round(mean, 6) for mean in means.values()}) == 1, means


def test_costs_come_from_a_file_or_are_refused_with_a_way_out(tmp_path):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"costs": dataclasses.asdict(FREE)}))
    assert costs.read_costs(file, 5) == FREE
    file.write_text(json.dumps(dataclasses.asdict(FREE)))
    assert costs.read_costs(file, 5) == FREE
    file.write_text('{"step": 1}')
    with pytest.raises(ConfigError, match="rlsys bench CONFIG --json FILE"):
        costs.read_costs(file, 5)
    for wrong, shown_value in {"-1": "-1", "NaN": "NaN", '"1"': '"1"', "[1]": r"\[1\]", "null": "null"}.items():
        file.write_text(json.dumps(dataclasses.asdict(FREE)).replace('"step_s": 0.0', f'"step_s": {wrong}'))
        with pytest.raises(
            ConfigError, match=rf"step_s is {shown_value}\. .* with seconds, none less than 0, for step_s"
        ):
            costs.read_costs(file, 5)
    with pytest.raises(ConfigError, match="No such file"):
        costs.read_costs(tmp_path / "none", 5)


def test_costs_that_make_a_step_take_no_time_are_refused():
    with pytest.raises(ConfigError, match="a step would take no time"):
        report()
    with pytest.raises(ConfigError, match="a step would take no time"):
        report(score_s=1.0)  # nothing is scored where a step has one update
