"""Two updates of a small model: by `ZeroEngine` as each case sets it, or by torch alone."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from fakes import make_batch
from transformers import AutoConfig, AutoModelForCausalLM

from rlsys.batching.packing import pack
from rlsys.config.schema import PolicyConfig
from rlsys.forward import attention
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.types import Columns, Pack

LR, UPDATES = 1e-3, 2


@dataclass(frozen=True)
class Case:
    zero_stage: int
    dtype: str = "float32"
    offload: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    nan: bool = False  # one loss is not a number


CASES = [
    Case(0),
    Case(3),
    *(Case(stage, "bfloat16") for stage in range(4)),
    Case(2, offload=("optimizer",), gradient_checkpointing=True),
    Case(3, offload=("optimizer",), gradient_checkpointing=True),
    Case(3, "bfloat16", gradient_checkpointing=True),
    *(Case(stage, "bfloat16", nan=True) for stage in (0, 3)),
]


def build_model(case: Case) -> PackedLogprobs:
    torch.manual_seed(0)
    # The large vocabulary: with ZeRO 3 some parameters are gathered ahead, and the small ones are not split.
    config = AutoConfig.for_model(
        "qwen2", vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    lm = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, case.dtype), attn_implementation=attention.PACKED_ATTENTION
    )
    if case.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": case.zero_stage == 3, "preserve_rng_state": False})
    return PackedLogprobs(lm)


def make_packs(ranks: int) -> list[list[Pack]]:
    batch = make_batch([0.0] * 8, [i // 4 for i in range(8)], [9, 12] * 4)
    tokens = int(batch.lengths.sum())
    columns = Columns(advantages=np.linspace(-1, 1, tokens, dtype=np.float32))
    weights = np.full(tokens, 1 / tokens, np.float32)
    return pack(batch, range(8), ranks=ranks, tokens_per_pack=60, columns=columns, weights=weights)


def pack_loss(pack: Pack, output: tuple[Any, Any]) -> Any:
    assert pack.columns.advantages is not None
    return -(output[0] * torch.from_numpy(pack.columns.advantages * pack.weights)).sum()


def run_case(case: Case, rank: int, ranks: int) -> dict[str, Any]:
    """Returns the gradient norm of each update, the log-probs after them, and a sum of |weights|."""
    from workers.learner.zero import ZeroEngine

    settings = PolicyConfig(
        ranks=ranks, weight_decay=0.0, clip_grad=0.0, **{k: v for k, v in asdict(case).items() if k != "nan"}
    )
    model = build_model(case)
    engine, packs = ZeroEngine(model, settings, LR), make_packs(ranks)[rank]

    def loss(pack: Pack, output: Any) -> Any:
        return pack_loss(pack, output) * (float("nan") if case.nan and rank == 0 else 1.0)

    steps = [engine.minimize(packs, loss, LR) for _ in range(UPDATES)]
    parameters = list(model.parameters())
    with engine.gathered(*parameters):
        weights = sum(float(p.detach().double().abs().sum()) for p in parameters)
    logprobs = [x for output, _ in engine.forward_all(packs) for x in output.tolist()]
    moments = engine.state.owned_tensors(dict(model.named_parameters()), ("exp_avg",))
    return {
        "norms": [step["grad_norm"] for step in steps],
        "skipped": [step["skipped"] for step in steps],
        "weights": weights,
        "logprobs": logprobs,
        "step": float(moments.get("step", 0.0)),
    }


def run_plainly() -> dict[str, Any]:
    """The same by torch: all packs together, one process, float32, AdamW."""
    model = build_model(Case(0))
    adam = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    packs, norms = [p for rank in make_packs(2) for p in rank], []
    for _ in range(UPDATES):
        adam.zero_grad()
        for p in packs:
            pack_loss(p, model(p)).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        adam.step()
    weights = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    with torch.no_grad():
        logprobs = [model(p)[0].tolist() for p in make_packs(2)[0]]
    return {"norms": norms, "weights": weights, "logprobs": [x for pack in logprobs for x in pack]}
