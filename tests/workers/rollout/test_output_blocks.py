"""Outputs in blocks: from vLLM's own scheduler, and read by its own processor of outputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_scheduler import Core, logprob, make_request, make_scheduler, plain, token
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from workers.rollout.output_blocks import OutputBlocks, build_in_flight_scheduler, build_scheduler

LENGTH = 40  # tokens: two blocks of 16, and 8


def output(request: str, token: int, *, last: bool = False) -> EngineCoreOutput:
    return EngineCoreOutput(request, [token], finish_reason=FinishReason.LENGTH if last else None)


def lists(*rows: tuple[int, float, int]) -> LogprobsLists:
    """Of one token for each request: token, log-prob and rank."""
    tokens, logprobs, ranks = zip(*rows, strict=True)
    return LogprobsLists(np.array(tokens)[:, None], np.array(logprobs, np.float32)[:, None], np.array(ranks))


def test_a_block_leaves_when_it_is_full_or_its_request_ends() -> None:
    blocks, leaving = OutputBlocks(3), []
    for step in range(5):
        outputs = [output("b", step, last=step == 4), output("a", step + 10)]
        leaving += blocks.gather(outputs, {"a": 0, "b": 1}, lists((step + 10, 1.0, 1), (step, -step / 8, step + 1)))
    assert [(o.request_id, o.new_token_ids, o.finished) for o in leaving] == [
        ("b", [0, 1, 2], False),
        ("a", [10, 11, 12], False),
        ("b", [3, 4], True),
    ]
    sent = leaving[2].new_logprobs
    assert (sent.logprob_token_ids.tolist(), sent.logprobs.tolist()) == ([[3], [4]], [[-3 / 8], [-4 / 8]])
    assert sent.sampled_token_ranks.tolist() == [4, 5]
    assert list(blocks.held) == ["a"]


def test_what_an_aborted_request_left_is_dropped() -> None:
    blocks = OutputBlocks(3)
    blocks.gather([output("a", 1), output("b", 1)], {"a": 0, "b": 1}, lists((1, -1.0, 1), (1, -1.0, 1)))
    blocks.forget_all_but({"b": None})
    assert list(blocks.held) == ["b"]


def play(folder: Path, build: Any, requests: int = 6) -> tuple[Any, list[list[Any]]]:
    """Returns a scheduler, and the outputs in each of its messages. The last request is aborted in the middle."""
    scheduler, messages = make_scheduler(folder, build), []
    for name in map(str, range(requests)):
        scheduler.add_request(make_request(name, [3] * 20, LENGTH))
    core = Core(scheduler)
    while scheduler.has_requests() or core.running:
        messages += [message.outputs for message in core.step()[1].values()]
        if core.sampled[str(requests - 1)] == LENGTH // 2 + 1:  # one of them is not read yet
            scheduler.finish_requests(str(requests - 1), RequestStatus.FINISHED_ABORTED)
    return scheduler, messages


@pytest.mark.parametrize(
    ("build", "message_count", "sizes"),
    [(plain, LENGTH, {1}), (build_scheduler, 3, {16, 8}), (build_in_flight_scheduler, LENGTH, {1})],
)
def test_the_core_sends_a_message_for_sixteen_tokens_instead_of_one(
    build: Any, message_count: int, sizes: set[int], tmp_path: Path
) -> None:
    scheduler, messages = play(tmp_path, build)
    assert isinstance(scheduler, AsyncScheduler), "the next batch is scheduled while the device computes"
    assert len(messages) == message_count
    assert {len(o.new_token_ids) for outputs in messages for o in outputs} == sizes
    arrays = [o.new_logprobs for outputs in messages for o in outputs if o.new_logprobs is not None]
    assert len(arrays) == (5 * LENGTH + 20 if build is plain else 5 * 3 + 1)


@pytest.mark.parametrize("build", [plain, build_scheduler, build_in_flight_scheduler])
def test_every_request_gets_its_tokens_and_log_probs(build: Any, tmp_path: Path) -> None:
    _, messages = play(tmp_path, build)
    outputs = [o for message in messages for o in message]
    for name in map(str, range(5)):
        mine = [o for o in outputs if o.request_id == name]
        assert [t for o in mine for t in o.new_token_ids] == [token(name, i) for i in range(LENGTH)]
        sent = [o.new_logprobs for o in mine if o.new_logprobs is not None]
        for part, expected in (
            ("logprob_token_ids", [[token(name, i)] for i in range(LENGTH)]),
            ("logprobs", [[logprob(name, i)] for i in range(LENGTH)]),
            ("sampled_token_ranks", [1 + i % 5 for i in range(LENGTH)]),
        ):
            assert np.concatenate([getattr(lists, part) for lists in sent]).tolist() == expected
        assert [o.finish_reason for o in mine if o.finished] == [FinishReason.LENGTH]
        assert mine[-1].finished


@pytest.mark.parametrize("build", [build_scheduler, build_in_flight_scheduler])
def test_speculative_decoding_which_samples_several_rows_for_a_request_is_refused(build: Any, tmp_path: Path) -> None:
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    make_scheduler(tmp_path, plain, asynchronous=False, speculative_config=ngrams)
    with pytest.raises(
        AssertionError, match=r"^vLLM speculates with 3 tokens a step.* one row .* for each request: leave out"
    ):
        make_scheduler(tmp_path, build, asynchronous=False, speculative_config=ngrams)


@pytest.mark.parametrize("hold_tokens", [True, False])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_vllm_reads_blocks_as_it_reads_single_outputs(length: int, hold_tokens: bool) -> None:
    params = SamplingParams(
        logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=length
    )
    request = EngineCoreRequest("a", [1], None, params, None, 0.0, None, None, None, external_req_id="a")
    processor, blocks = OutputProcessor(None, log_stats=False), OutputBlocks(3, hold_tokens)
    processor.add_request(request, None)
    for i in range(length):
        leaving = blocks.gather([output("a", i, last=i == length - 1)], {"a": 0}, lists((i, -i / 8, 1)))
        outputs = processor.process_outputs(leaving).request_outputs
    [completion] = outputs[0].outputs
    assert list(completion.token_ids) == list(range(length))
    assert completion.logprobs.logprobs == [-i / 8 for i in range(length)]
