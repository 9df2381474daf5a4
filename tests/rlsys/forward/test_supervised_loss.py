"""The loss of supervised training is the cross-entropy of the shown tokens, and TRL's on the same rows."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chat_families import family_tokenizer
from data_files import lines, load

from rlsys.algorithms.losses import LOSSES
from rlsys.batching.packing import pack, token_weights
from rlsys.forward.attention import PACKED_ATTENTION
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.sampling.demonstrations import demonstrated_sample, demonstration_batch
from rlsys.tasks import zigzag

TEXTS = [{"prompt": f"{a}>", "answer": f"{b}"} for a, b in ((12, 21), (864152, 481625), (3, 3), (907, 70))]
CHATS = [
    {"prompt": [{"role": "user", "content": str(a)}], "answer": str(b)}
    for a, b in ((12, 21), (864152, 481625), (3, 3), (907, 70))
]
TALKS = [
    {
        "prompt": [
            {"role": "user" if i % 2 == 0 else "assistant", "content": f"{word} {i} " * (1 + i % 3)}
            for i in range(turns)
        ]
    }
    for word, turns in (("yes", 2), ("no", 6), ("perhaps", 4))
]
SYMBOLS = [*zigzag.SYMBOLS, "<system>", "<user>", "<assistant>"]
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
# Loss and gradient norm by TRL 1.16's SFTTrainer: `python tests/bench/trl/sft_loss.py`. Of chats it also learns what a template
# writes behind the end of a turn, such as a line end, for which no engine asks a model. This template writes nothing there.
TRL = {"texts": (2.9057106971740723, 8.860597610473633), "chats": (2.91072678565979, 9.743109703063965)}


def digit_tokenizer():
    """Its tokens have the same numbers everywhere, unlike those of one that is trained on a text."""
    tokenizer = zigzag.make_tokenizer(SYMBOLS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model_of(tokenizer):
    return zigzag.build_model(0, [""] * len(tokenizer))


def packed_loss(rows, tokenizer, budget):
    """As a rank computes it, pack by pack; with the norm of its gradient."""
    model = model_of(tokenizer)
    model.set_attn_implementation(PACKED_ATTENTION)
    forward, batch = PackedLogprobs(model), demonstration_batch(rows, 0)
    weights = token_weights(torch.from_numpy(batch.lengths), "token_mean").numpy()
    [packs] = pack(batch, range(len(rows)), ranks=1, tokens_per_pack=budget, weights=weights)
    total = torch.zeros(())
    for p in packs:
        logprobs, _ = forward(p)
        ones, sequences = torch.ones(len(p.targets)), torch.from_numpy(p.sequences)
        loss = LOSSES["nll"](logprobs, logprobs.detach(), ones, sequences) * torch.from_numpy(p.weights)
        loss.sum().backward()
        total += loss.sum().detach()
    return total.item(), norm(model), len(packs)


def norm(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()


def plain_loss(sequences, tokenizer):
    """`sequences`: of each turn, all before it and what is learned. Each is computed by itself, by transformers."""
    model = model_of(tokenizer)
    losses = []
    for before, learned in sequences:
        logits = model(torch.tensor([[*before, *learned]])).logits[0, len(before) - 1 : -1]
        losses.append(F.cross_entropy(logits, torch.tensor(learned), reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), norm(model)


def turns_of(rows):
    turns = []
    for row in rows:
        sample = demonstrated_sample(row, 0)
        paths = {-1: list(row.tokens)}
        for i, ((read, learned), after) in enumerate(zip(sample.turns, sample.continued_turns, strict=True)):
            before = paths[after] + read.tolist()
            paths[i] = before + learned.tolist()
            turns.append((before, learned.tolist()))
    return turns


@pytest.mark.parametrize("budget", [200, 10_000])
@pytest.mark.parametrize("kind", [TEXTS, CHATS, TALKS], ids=["texts", "chats", "talks"])
@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "harmony"])
def test_it_is_the_mean_cross_entropy_of_each_turn_by_itself(tmp_path, family, kind, budget):
    tokenizer = family_tokenizer(family)
    rows = list(load(lines(tmp_path, *kind), tokenizer, supervised=True, longest=1000))
    loss, gradient, packs = packed_loss(rows, tokenizer, budget)
    assert (packs > 1) == (budget == 200 and len(np.concatenate([b + t for b, t in turns_of(rows)])) > 200)
    assert (loss, gradient) == pytest.approx(plain_loss(turns_of(rows), tokenizer), rel=1e-5)


@pytest.mark.parametrize(("name", "kind"), [("texts", TEXTS), ("chats", CHATS)])
def test_it_is_that_of_trl(tmp_path, name, kind):
    rows = list(load(lines(tmp_path, *kind), digit_tokenizer(), supervised=True, longest=1000))
    assert packed_loss(rows, digit_tokenizer(), 10_000)[:2] == pytest.approx(TRL[name], rel=1e-4)


if __name__ == "__main__":  # writes model and rows for tests/bench/trl/sft_loss.py
    import sys
    from pathlib import Path

    folder = Path(sys.argv[1])
    tokenizer = digit_tokenizer()
    model_of(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "rows.json").write_text(json.dumps({"texts": TEXTS, "chats": CHATS}))
