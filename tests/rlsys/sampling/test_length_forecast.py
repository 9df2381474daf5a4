from fakes import FakeRewards, FakeRollout, make_dataset, make_prompt, make_sample

from rlsys.config.schema import RewardConfig
from rlsys.sampling.collector import Collector
from rlsys.sampling.length_forecast import LengthForecast
from rlsys.sampling.sampling_plan import SamplingPlan


def uids(prompts):
    return [p.uid for p in prompts]


def test_what_nothing_is_known_of_stays_in_the_order_of_the_data():
    prompts = make_dataset(5).take(0, 5)
    assert uids(LengthForecast().longest_first(prompts)) == uids(prompts)


def test_a_row_is_expected_to_be_as_long_as_in_its_last_epoch():
    lengths = LengthForecast()
    short, long = make_prompt("a:1#0"), make_prompt("a:2#0")
    lengths.observe([short, long], [make_sample("a:1#0", i, text="48") for i in range(2)] + [make_sample("a:2#0")])
    assert lengths.expected(make_prompt("a:1#1")) == 3
    assert lengths.expected(make_prompt("a:2#1")) == 7
    assert uids(lengths.longest_first([make_prompt("a:1#1"), make_prompt("a:2#1")])) == ["a:2#1", "a:1#1"]


def test_a_row_that_is_not_known_is_expected_to_be_as_long_as_its_source():
    lengths = LengthForecast()
    lengths.observe([make_prompt("a:1#0", source="a")], [make_sample("a:1#0")])
    lengths.observe([make_prompt("b:1#0", source="b")], [make_sample("b:1#0", text="4")])
    new = [make_prompt("c:9#0", source="c"), make_prompt("b:9#0", source="b"), make_prompt("a:9#0", source="a")]
    assert [lengths.expected(p) for p in new] == [0, 2, 7]
    assert uids(lengths.longest_first(new)) == ["a:9#0", "b:9#0", "c:9#0"]


def test_what_is_expected_changes_the_order_of_asking_and_nothing_else():
    batches = []
    for known in (False, True):
        rollout = FakeRollout([])
        collector = Collector(rollout, FakeRewards(), seed=0, reward=RewardConfig())
        prompts = make_dataset(4).take(0, 4)
        if known:
            collector.length_forecast.observe(
                prompts, [make_sample(p.uid, text="4" * i) for i, p in enumerate(prompts, 1)]
            )
        batch = collector.collect(1, prompts, SamplingPlan(2, 1.0, max_new_tokens=7))
        batches.append([(s.uid, s.index, s.text) for s in batch.samples])
        order = list(dict.fromkeys(r.uid for r in rollout.requests[0]))
        assert order == (uids(prompts)[::-1] if known else uids(prompts))
    assert batches[0] == batches[1]
