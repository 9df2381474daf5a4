"""Log-probs in blocks: with vLLM's own outputs, and what its own processor of outputs makes of them."""

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

from workers.rollout.logprob_blocks import LogprobBlocks


def output(request: str, token: int, logprob: float, *, last: bool = False) -> EngineCoreOutput:
    lists = LogprobsLists(np.array([[token]], np.int32), np.array([[logprob]], np.float32), np.array([1], np.int32))
    return EngineCoreOutput(request, [token], new_logprobs=lists, finish_reason=FinishReason.LENGTH if last else None)


def test_a_block_leaves_when_it_is_full_or_its_request_ends() -> None:
    blocks, sizes = LogprobBlocks(3), []
    for token in range(5):
        for request in ("a", "b"):
            out = output(request, token, -token / 8, last=token == 4)
            blocks.gather(out)
            sizes.append(out.new_logprobs and out.new_logprobs.logprobs[:, 0].tolist())
    expected = [None, None, [0, -1 / 8, -2 / 8], None, [-3 / 8, -4 / 8]]
    assert sizes == [size for size in expected for _ in "ab"]
    assert not blocks.held


def test_what_an_aborted_request_left_is_dropped() -> None:
    blocks = LogprobBlocks(3)
    for request in ("a", "b"):
        blocks.gather(output(request, 1, -1.0))
    blocks.forget_all_but({"b": None})
    assert list(blocks.held) == ["b"]


@pytest.mark.parametrize("length", [1, 3, 7])
def test_vllm_reads_blocks_as_it_reads_single_log_probs(length: int) -> None:
    params = SamplingParams(
        logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=length
    )
    request = EngineCoreRequest("a", [1], None, params, None, 0.0, None, None, None, external_req_id="a")
    processor, blocks = OutputProcessor(None, log_stats=False), LogprobBlocks(3)
    processor.add_request(request, None)
    for token in range(length):
        out = output("a", token, -token / 8, last=token == length - 1)
        blocks.gather(out)
        outputs = processor.process_outputs([out]).request_outputs
    [completion] = outputs[0].outputs
    assert list(completion.token_ids) == list(range(length))
    assert completion.logprobs.logprobs == [-token / 8 for token in range(length)]
