"""Stop strings of requests whose outputs come in blocks end where vLLM ends them by itself, which looks at every token."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_scheduler import Core, logprob, make_request, make_scheduler, plain, token
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.request import RequestStatus

from rlsys.types import Request, Sample
from workers.rollout.engine_settings import CPU_ENVIRONMENT, engine_arguments
from workers.rollout.output_blocks import BLOCK, build_in_flight_scheduler, build_scheduler
from workers.rollout.stopping import stop_length
from workers.rollout.stops_in_blocks import StopsInBlocks
from workers.rollout.vllm_requests import Stops, request_id, sampling_params

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from bench_models import random_model

pytestmark = pytest.mark.long

LENGTH = 40  # tokens: two blocks of 16, and 8
NOTES_VERSIONS = hasattr(RequestState, "track_weight_version")  # since vLLM 0.32


# --- real engines -----------------------------------------------------------------------------------------------------

# Engine processes import the file again. `own` is vLLM, told of the strings; the others are ours.
ENGINE = """
import asyncio, json, sys
from dataclasses import replace
from rlsys.types import Request
from workers.rollout.async_engine import AsyncEngine
from workers.rollout.vllm_requests import Stops, request_id, sampling_params, token_prompt

LENGTH = 40

def pieces(text, token_ends):
    # Stop strings by the text of a completion: in its first token, across tokens and blocks, at the very end, and nowhere.
    ends = [0, *token_ends]
    across = lambda n: text[max(ends[n] - 2, 0) : ends[n] + 2]
    last = text[ends[LENGTH - 1] :] if ends[LENGTH - 1] < ends[LENGTH] else text[-1:]
    for strings in ([text[:1]], [text[-1:]], [text[-5:]], [last], [across(16)], [across(32)], [across(7)], ["absent!"]):
        yield strings
    yield [text[ends[20] : ends[23]], text[ends[18] : ends[19]] or "absent!"]  # the later one first
    yield ["absent!", text[ends[33] : ends[35]], text[ends[3] : ends[5]]]

async def main():
    settings, own, prompts = json.load(sys.stdin)
    engine = AsyncEngine(settings)
    tokenizer = engine.engine.output_processor.tokenizer

    async def sample(request, stops):
        if own:
            async for output in engine.engine.generate(token_prompt(request), sampling_params(request, stops), request_id="a"):
                [c] = output.outputs
        else:
            async for [output] in engine.generate([request], stops):
                [c] = output.outputs
        return list(c.token_ids), list(c.logprobs.logprobs), c.finish_reason

    for i, prompt in enumerate(prompts):
        whole = Request(f"p{i}", 0, prompt, i, 1.0, LENGTH)
        tokens, logprobs, _ = await sample(replace(whole, ignore_end=True), Stops([], ["e"]))
        print("result", json.dumps([tokens, logprobs, "ignored"]), flush=True)
        texts = [tokenizer.decode(tokens[:n]) for n in range(1, LENGTH + 1)]
        for strings in pieces(texts[-1], [*map(len, texts)]):
            strings = [s for s in strings if s]
            for stops in (Stops([], strings), Stops([], strings, 20), Stops([tokens[22]], strings)):
                print("result", json.dumps(await sample(whole, stops)), flush=True)
    # In one call, of several lengths, while others run.
    requests = [Request(f"q{i}", 0, p, i, 1.0, 17 + 3 * i) for i, p in enumerate(prompts)]
    stops = Stops([], ["e", "so", "n"])
    if own:
        for r in requests:
            print("result", json.dumps(await sample(r, stops)), flush=True)
    else:
        by_id = {o.request_id: o.outputs[0] async for batch in engine.generate(requests, stops) for o in batch}
        for r in requests:
            c = by_id[request_id(r)]
            print("result", json.dumps([list(c.token_ids), list(c.logprobs.logprobs), c.finish_reason]), flush=True)
    searches = engine.stops_in_blocks
    assert own or not searches.asked and not searches.searches, (searches.asked, searches.searches)
    engine.engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def engine_settings(byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from rlsys.config.loading import load_config

    folder = str(tmp_path_factory.mktemp("bytes"))
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    vocabulary = {"num_key_value_heads": 4, "vocab_size": len(byte_tokenizer), "max_position_embeddings": 128}
    random_model(**shape, **vocabulary, tie_word_embeddings=True).save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    config = load_config("configs/tiny_cpu.yaml", ["rollout.tensor_parallel=2", "rollout.stop=['x']"])
    return engine_arguments(config, folder, "rlsys_host_memory", 100) | {"tensor_parallel_size": 1}


def sample_by(settings: dict[str, Any], own: bool, prompts: list[list[int]], folder: Path) -> list[Any]:
    script = folder / "engine.py"  # a file: the engine starts processes of its own
    script.write_text(ENGINE)
    environment = {**os.environ, **CPU_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    given = json.dumps([settings, own, prompts])
    done = subprocess.run(
        [sys.executable, script], input=given, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    return [json.loads(line.removeprefix("result ")) for line in lines if line.startswith("result ")]


PROMPTS = ["Next question:", "so <answer>"]


@pytest.fixture(scope="module")
def by_vllm(
    engine_settings: dict[str, Any], byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    settings = {key: value for key, value in engine_settings.items() if key != "scheduler_cls"}
    return sample_by(settings, True, [byte_tokenizer.encode(p) for p in PROMPTS], tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("kind", ["scheduler", "in_flight_scheduler"])
def test_engines_with_blocks_end_completions_where_vllm_does(
    kind: str, engine_settings: dict[str, Any], by_vllm: list[Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    assert engine_settings["scheduler_cls"] == "workers.rollout.output_blocks.build_scheduler"
    settings = engine_settings | {"scheduler_cls": f"workers.rollout.output_blocks.build_{kind}"}
    results = sample_by(settings, False, [byte_tokenizer.encode(p) for p in PROMPTS], tmp_path)
    assert len(results) == len(by_vllm) == len(PROMPTS) * (1 + 3 * 10) + len(PROMPTS)
    for i, (ours, theirs) in enumerate(zip(results, by_vllm, strict=True)):
        assert ours == theirs, f"result {i}"
        assert len(ours[0]) == len(ours[1])
    lengths = {(len(tokens), reason) for tokens, _, reason in results}
    assert {(1, "stop"), (LENGTH, "stop"), (LENGTH, "length")} <= lengths
    assert len(lengths) > 10


# --- where outputs arrive ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def letters() -> Any:
    """A tokenizer with another letter for each of the 50 tokens that the model of these tests samples."""
    words = {chr(0x4E00 + i): i for i in range(50)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=chr(0x4E00)))
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=chr(0x4E00))


class Asked:
    """A core, vLLM's processor of what it sends, and the version of the weights, which changes with each fifth token."""

    def __init__(self, tokenizer: Any, build: Any, folder: Path):
        self.scheduler = make_scheduler(folder, build)
        self.core, self.processor = Core(self.scheduler), OutputProcessor(tokenizer, log_stats=False)
        self.stops, self.finished = StopsInBlocks(self.processor), dict[str, Any]()
        self.aborted: list[str] = []

    def ask(self, name: str, request: Request, stops: Stops) -> None:
        params = sampling_params(request, self.stops.watch(request, stops))
        assert not params.detokenize
        assert params.output_kind is RequestOutputKind.FINAL_ONLY
        ids = request.tokens
        asked = EngineCoreRequest(
            name, ids, None, params, None, 0.0, None, None, None, external_req_id=request_id(request)
        )
        self.processor.add_request(asked, None)
        self.scheduler.add_request(make_request(name, ids, params.max_tokens))

    def run(self) -> None:
        steps = 0
        while self.scheduler.has_requests() or self.core.running:
            steps += 1
            for message in self.core.step()[1].values():
                version = {"weight_version": str(steps // 5)} if NOTES_VERSIONS else {}
                done = self.processor.process_outputs(message.outputs, **version)
                self.finished |= {o.request_id: o.outputs[0] for o in done.request_outputs}
                self.aborted += done.reqs_to_abort
                for name in done.reqs_to_abort:
                    self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


def letter(name: str, position: int) -> str:
    return chr(0x4E00 + token(name, position))


BUILDS = pytest.mark.parametrize("build", [plain, build_scheduler, build_in_flight_scheduler])


@BUILDS
def test_a_string_may_end_at_any_token_and_no_more_than_a_block_is_sampled_for_nothing(
    build: Any, letters: Any, tmp_path: Path
) -> None:
    asked = Asked(letters, build, tmp_path)
    for n in range(1, LENGTH + 1):
        strings = ["absent", "".join(letter(str(n), i) for i in range(max(n - 3, 0), n))]
        asked.ask(str(n), Request(f"p{n}", 0, [3] * 5, n, 1.0, LENGTH), Stops([], strings))
    asked.run()
    size = 1 if build is plain else BLOCK
    for n in range(1, LENGTH + 1):
        done, name = asked.finished[f"p{n}/0/0"], str(n)
        assert (done.finish_reason, done.stop_reason) == (
            "stop",
            "".join(letter(name, i) for i in range(max(n - 3, 0), n)),
        )
        assert list(done.token_ids) == [token(name, i) for i in range(n)]
        assert done.logprobs.logprobs == [logprob(name, i) for i in range(n)]
        assert asked.core.sampled[name] <= min(-(-n // size) * size + 2, LENGTH), "two batches are on their way"
    assert set(asked.aborted) == {str(n) for n in range(1, LENGTH + 1) if n <= LENGTH // size * size and n < LENGTH}
    assert not asked.stops.searches


@BUILDS
def test_the_first_end_counts_whatever_the_order_of_strings_and_whatever_ended_the_request(
    build: Any, letters: Any, tmp_path: Path
) -> None:
    asked = Asked(letters, build, tmp_path)
    asked.ask("1", Request("late first", 0, [3], 0, 1.0, LENGTH), Stops([], [letter("1", 12), letter("1", 5)]))
    asked.ask("2", Request("limit", 0, [3], 0, 1.0, 20), Stops([], [letter("2", 17)]))
    asked.ask("3", Request("at the limit", 0, [3], 0, 1.0, 20), Stops([], [letter("3", 19)]))
    asked.ask("4", Request("beyond", 0, [3], 0, 1.0, 20), Stops([], [letter("4", 20)]))
    asked.ask("5", Request("not before", 0, [3], 0, 1.0, LENGTH), Stops([], [letter("5", 3), letter("5", 9)], 8))
    asked.ask("6", Request("ignored", 0, [3], 0, 1.0, 20, ignore_end=True), Stops([], [letter("6", 3)]))
    asked.ask("7", Request("none", 0, [3], 0, 1.0, 20), Stops([]))
    asked.run()
    ends = {name: (len(c.token_ids), len(c.logprobs.logprobs), c.finish_reason) for name, c in asked.finished.items()}
    assert ends == {
        "late first/0/0": (6, 6, "stop"),
        "limit/0/0": (18, 18, "stop"),
        "at the limit/0/0": (20, 20, "stop"),
        "beyond/0/0": (20, 20, "length"),
        "not before/0/0": (10, 10, "stop"),
        "ignored/0/0": (20, 20, "length"),
        "none/0/0": (20, 20, "length"),
    }


@BUILDS
def test_a_string_that_began_before_an_interruption_ends_the_rest(build: Any, letters: Any, tmp_path: Path) -> None:
    """The core samples the rest as if it were a request of its own."""
    asked, before = Asked(letters, build, tmp_path), np.array([7, 8, 9], np.int32)
    string = chr(0x4E00 + 9) + letter("1", 0) + letter("1", 1)
    begun = Sample("p", 0, "", before, np.zeros(3, np.float32), "cut", 0)
    asked.ask("1", Request("p", 0, [3], 0, 1.0, LENGTH, partial=begun), Stops([], [string]))
    asked.run()
    done = asked.finished["p/0/0"]
    assert (list(done.token_ids), done.finish_reason) == ([token("1", 0), token("1", 1)], "stop")
    whole = Request("p", 0, [3], 0, 1.0, LENGTH)
    assert stop_length(letters, whole, [*before.tolist(), *done.token_ids], Stops([], [string])) == 5


def test_a_request_that_is_asked_for_again_is_read_anew(letters: Any, tmp_path: Path) -> None:
    asked, stops = Asked(letters, build_scheduler, tmp_path), Stops([], [letter("2", 4)])
    first, again = (Request("p", 0, [3], 0, 1.0, LENGTH) for _ in range(2))
    asked.ask("1", first, stops)
    for _ in range(20):
        asked.core.step()
    asked.ask("2", again, stops)
    asked.processor.abort_requests(["1"], internal=True)
    asked.scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    asked.stops.forget(first)
    asked.run()
    assert list(asked.finished["p/0/0"].token_ids) == [token("2", i) for i in range(5)]
    asked.stops.forget(again)
    assert not asked.stops.asked


@pytest.mark.skipif(not NOTES_VERSIONS, reason="vLLM before 0.32 notes no versions")
@pytest.mark.parametrize("build", [plain, build_in_flight_scheduler])
def test_tokens_after_the_string_take_their_versions_with_them(build: Any, letters: Any, tmp_path: Path) -> None:
    asked = Asked(letters, build, tmp_path)
    asked.ask("1", Request("p", 0, [3], 0, 1.0, LENGTH), Stops([], [letter("1", 7)]))
    asked.ask("2", Request("whole", 0, [3], 0, 1.0, LENGTH), Stops([]))
    asked.run()
    part, whole = asked.finished["p/0/0"].weight_versions, asked.finished["whole/0/0"].weight_versions
    assert len([span for span in whole if span.start < 8]) > 1
    assert [(s.version, s.start) for s in part if s.start < 8] == [(s.version, s.start) for s in whole if s.start < 8]
