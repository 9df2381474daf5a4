"""`rlsys serve` itself, on a run of the tiny model, with a real engine."""

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import anthropic
import httpx
import openai
import pytest

from rlsys.config import loading
from rlsys.tasks.zigzag import SYMBOLS

pytestmark = pytest.mark.long

PROMPT = [{"role": "user", "content": "152804>"}]
START_S = 500.0
WINDOW = 8192  # tokens, for a request that takes long
THREE = SYMBOLS.index("3")  # ends a completion in this run; the greedy reply to the prompt has none


@pytest.fixture(scope="module")
def served(tiny, model, tmp_path_factory):
    """The command's address and key, and clients. The checkpoint of step 2 is the model; step 4 has none."""
    run = tmp_path_factory.mktemp("runs") / "demo"
    for step in (2, 4):
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    shutil.copytree(model, run / "checkpoints" / "step-000002" / "model")
    file = run / "checkpoints" / "step-000002" / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": WINDOW}))
    config = tiny(f"rollout.stop_token_ids=[{THREE}]")
    (run / "config.yaml").write_text(loading.to_yaml(config))
    (run / "metrics.jsonl").touch()
    command = [sys.executable, "-m", "launch", "serve", str(run), "--step", "2", "--port", "0"]
    log = run / "serve.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[3], env=os.environ
        )
    deadline = time.monotonic() + START_S
    while "ANTHROPIC_API_KEY" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    address, key = re.search(r"ANTHROPIC_BASE_URL=(\S+) ANTHROPIC_API_KEY=(\S+)", log.read_text()).groups()
    chat = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
    claude = anthropic.Anthropic(base_url=address, api_key=key, max_retries=0)
    yield SimpleNamespace(address=address, key=key, chat=chat, claude=claude)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()


@pytest.fixture(scope="module")
def expected(model):
    """The greedy reply of the model to the prompt, and the log-probs of its tokens, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens, logprobs = list(tokenizer("152804>").input_ids), []
    while not logprobs or tokens[-1] != tokenizer.eos_token_id:
        of_next = torch.log_softmax(policy(torch.tensor([tokens])).logits[0, -1], -1)
        tokens.append(int(of_next.argmax()))
        logprobs.append(float(of_next.max()))
    return SimpleNamespace(text=tokenizer.decode(tokens[7:], skip_special_tokens=True), logprobs=logprobs)


def test_every_dialect_gives_the_models_reply(served, expected):
    greedy = {"model": "demo", "temperature": 0}
    assert served.chat.chat.completions.create(messages=PROMPT, **greedy).choices[0].message.content == expected.text
    assert served.chat.responses.create(input="152804>", **greedy).output_text == expected.text
    reply = served.claude.messages.create(model="demo", messages=PROMPT, max_tokens=10, extra_body={"temperature": 0})
    assert reply.content[0].text == expected.text


def test_streams_are_the_reply_in_pieces(served, expected):
    greedy = {"model": "demo", "temperature": 0}
    chunks = served.chat.chat.completions.create(messages=PROMPT, stream=True, **greedy)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    with served.chat.responses.stream(input="152804>", **greedy) as stream:
        assert stream.get_final_response().output_text == expected.text
    with served.claude.messages.stream(
        model="demo", messages=PROMPT, max_tokens=10, extra_body={"temperature": 0}
    ) as stream:
        assert "".join(stream.text_stream) == expected.text


def test_log_probs_are_the_models(served, expected):
    reply = served.chat.chat.completions.create(
        model="demo", messages=PROMPT, temperature=0, logprobs=True, top_logprobs=3
    )
    tokens = reply.choices[0].logprobs.content
    assert [token.logprob for token in tokens] == pytest.approx(expected.logprobs, abs=1e-5)
    assert all(token.top_logprobs[0].token == token.token for token in tokens), "greedy"
    assert {len(token.top_logprobs) for token in tokens} == {3}
    reply = served.chat.responses.create(
        model="demo", input="152804>", temperature=0, include=["message.output_text.logprobs"]
    )
    logprobs = [token.logprob for token in reply.output[0].content[0].logprobs]
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_reply_ends_at_its_limit_and_at_its_stop_strings(served, expected):
    digit = expected.text[2]
    create = served.chat.chat.completions.create
    cut = create(model="demo", messages=PROMPT, temperature=0, max_tokens=2).choices[0]
    assert (cut.message.content, cut.finish_reason) == (expected.text[:2], "length")
    stopped = create(model="demo", messages=PROMPT, temperature=0, stop=digit).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (expected.text[:2], "stop")
    greedy = {"temperature": 0}
    reply = served.claude.messages.create(
        model="demo", messages=PROMPT, max_tokens=10, stop_sequences=[digit], extra_body=greedy
    )
    assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == (
        "stop_sequence",
        digit,
        expected.text[:2],
    )


def test_a_reply_ends_at_the_runs_stop_tokens(served):
    reply = served.chat.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "132804>"}], temperature=0
    )
    assert reply.choices[0].finish_reason == "stop"
    assert len(reply.choices[0].message.content) < 6
    assert "3" not in reply.choices[0].message.content


def test_a_seed_decides_what_is_sampled(served):
    def sample(seed):
        reply = served.chat.chat.completions.create(model="demo", messages=PROMPT, seed=seed, n=4)
        return [choice.message.content for choice in reply.choices]

    assert sample(1) == sample(1) != sample(2)
    assert len(set(sample(1))) > 1, "the run's temperature, not a greedy one"


def test_without_a_chat_template_texts_follow_one_another(served):
    conversation = [*PROMPT, {"role": "assistant", "content": "480152"}, {"role": "user", "content": "31>"}]
    assert served.claude.messages.count_tokens(model="demo", messages=conversation).input_tokens == 7 + 6 + 3


def test_what_does_not_fit_into_the_window_is_refused(served):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens"):
        served.chat.chat.completions.create(model="demo", messages=[{"role": "user", "content": "1" * (WINDOW + 1)}])
    with pytest.raises(anthropic.BadRequestError, match="cannot be greater than max_model_len=8192"):
        served.claude.messages.create(model="demo", messages=PROMPT, max_tokens=WINDOW + 1)
    with pytest.raises(openai.BadRequestError, match="no chat template for a message of the role `system`"):
        served.chat.responses.create(model="demo", input="152804>", instructions="Be brief.")


def test_two_hundred_requests_at_once_are_all_answered(served, expected):
    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key=served.key, max_retries=0) as chat:

            async def ask(stream):
                reply = await chat.chat.completions.create(model="demo", messages=PROMPT, temperature=0, stream=stream)
                if not stream:
                    return reply.choices[0].message.content
                return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])

            return await asyncio.gather(*map(ask, 100 * [False, True]))

    assert asyncio.run(ask_all()) == 200 * [expected.text]


def test_an_engine_forgets_the_request_of_a_client_that_goes_away(served):
    def requests():
        return httpx.get(f"{served.address}/health").json()["requests"]

    stream = served.chat.chat.completions.create(
        model="demo", messages=PROMPT, stream=True, max_tokens=WINDOW - 7, extra_body={"ignore_eos": True}
    )
    began = time.monotonic()
    for _ in itertools.islice(stream, 40):
        pass
    taken = time.monotonic() - began
    assert requests() == 1
    stream.close()
    closed = time.monotonic()
    while requests():
        time.sleep(0.01)
    assert time.monotonic() - closed < (WINDOW / 40) * taken / 4, "the whole reply would have taken four times as long"
