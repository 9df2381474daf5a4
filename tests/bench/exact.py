"""What it costs that results do not depend on the batch (the default on CPU), and that engine and trainer compute alike
(`rollout.exact`): tokens per second of an engine, and seconds of the trainer's passes over what it sampled, in turn.

    python tests/bench/exact.py            # the tiny model, and one of 8 M parameters
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from workers.rollout.engine_settings import CPU_ENVIRONMENT

CONFIG = Path(__file__).parent.parent.parent / "configs" / "tiny_cpu.yaml"
ROUNDS = 5
# name → (prompts, their length, new tokens)
LOADS = {"tiny": [(512, 7, 10), (16, 7, 10)], "8 M": [(64, 40, 64), (8, 40, 64), (1, 40, 64)]}


def model_of(name: str, folder: Path) -> str:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlsys.tasks import zigzag

    if name == "tiny":
        return str(zigzag.model_folder(0))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        initializer_range=0.05,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    zigzag.make_tokenizer().save_pretrained(folder)
    return str(folder)


def in_turn(modes: dict[str, Callable[[], None]], work: Callable[[], object]) -> dict[str, float]:
    """Median seconds of the work in each mode."""
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for i in range(ROUNDS + 1):
        for mode, enter in modes.items():
            enter()
            began = time.perf_counter()
            work()
            if i:
                seconds[mode].append(time.perf_counter() - began)
    return {mode: statistics.median(values) for mode, values in seconds.items()}


def engines(name: str, model: str) -> None:
    import asyncio

    from vllm import ir
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from rlsys.checks import load_checked
    from rlsys.forward import exact
    from rlsys.types import Request
    from workers.cpu import exact_engine, norms
    from workers.rollout.engine_settings import engine_arguments
    from workers.rollout.in_process_engine import InProcessEngine
    from workers.rollout.vllm_requests import Stops

    rows = exact.MIN_ROWS, exact.MAX_ROWS
    own = CPUAttentionBackendImpl.forward, CPUAttentionBackendImpl.do_kv_cache_update, RotaryEmbedding.forward_cpu
    longest = max(length + tokens for _, length, tokens in LOADS[name])
    new = max(n for *_, n in LOADS[name])
    config = load_checked(CONFIG, [f"rollout.max_new_tokens={new}"])
    engine = InProcessEngine(engine_arguments(config, model, "rlsys_host_memory", longest_sequence=longest))

    def set_norms(*ways: str) -> None:
        for operation in norms.KERNEL_CONFIG["ir_op_priority"]:
            getattr(ir.ops, operation).set_default(list(ways))

    def plain() -> None:
        asyncio.run(engine.reset_prefix_cache())
        set_norms(norms.PROVIDER, "native")
        exact.MIN_ROWS, exact.MAX_ROWS = 1, 10**9
        CPUAttentionBackendImpl.forward, CPUAttentionBackendImpl.do_kv_cache_update, RotaryEmbedding.forward_cpu = own

    def default() -> None:
        plain()
        exact.MIN_ROWS, exact.MAX_ROWS = rows

    def exactly() -> None:
        default()
        set_norms("native")
        exact_engine.use_exact_attention()

    for prompts, length, tokens in LOADS[name]:
        requests = [
            Request(f"p{g}", 0, [2 + (g * 7 + i * 3 + g // (i + 1)) % 10 for i in range(length)], g, 1.0, tokens)
            for g in range(prompts)
        ]
        count = 0

        def generate(requests: list[Request] = requests) -> None:
            async def all_of_them() -> int:
                lists = engine.generate(requests, Stops([]))
                return sum([len(o.outputs[0].token_ids) async for outputs in lists for o in outputs])

            nonlocal count
            count = asyncio.run(all_of_them())

        seconds = in_turn({"plain": plain, "default": default, "exact": exactly}, generate)
        figures = ", ".join(f"{mode} {count / s:.0f} ({seconds['plain'] / s:.2f})" for mode, s in seconds.items())
        print(f"{name}, {prompts} sequences at once, tokens/s: {figures}", flush=True)


def trainers(name: str, model: str) -> None:
    import numpy as np
    import torch

    from rlsys.checks import load_checked
    from rlsys.types import Columns, Pack
    from workers.learner.files.loading import load_packed

    prompts, length, tokens = LOADS[name][0]
    each, count = length + tokens - 1, min(prompts, 4096 // (length + tokens - 1))
    total = each * count
    zeros = np.zeros(total, np.float32)
    pack = Pack(
        tokens=np.arange(total) * 7 % 11 + 2,
        lengths=[each] * count,
        parent=[-1] * count,
        targets=np.arange(total) * 5 % 11 + 2,
        samples=list(range(count)),
        target_counts=[each] * count,
        turn_counts=[each] * count,
        first_logit=list(range(0, total, each)),
        next_logits=list(range(1, total, each)),
        rollout=zeros,
        weights=zeros,
        columns=Columns(),
    )
    models = {exact: load_packed(load_checked(CONFIG, [f"rollout.exact={exact}"]), model) for exact in (False, True)}
    chosen = False

    def choose(exact: bool) -> Callable[[], None]:
        def chosen_now() -> None:
            nonlocal chosen
            chosen = exact

        return chosen_now

    def score() -> None:
        with torch.no_grad():
            models[chosen](pack)

    def update() -> None:
        models[chosen](pack)[0].sum().backward()

    modes = {"ordinary": choose(False), "exact": choose(True)}
    for doing, work in (("score", score), ("forward and backward", update)):
        seconds = in_turn(modes, work)
        ratio = seconds["exact"] / seconds["ordinary"]
        print(
            f"{name}, {total} tokens, {doing}: ordinary {seconds['ordinary']:.3f} s, exact {seconds['exact']:.3f} s "
            f"({ratio:.2f})",
            flush=True,
        )


def main() -> None:
    if len(sys.argv) == 4:
        part, name, model = sys.argv[1:]
        {"engines": engines, "trainers": trainers}[part](name, model)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in LOADS:
            model = model_of(name, Path(folder) / "model")
            for part in ("engines", "trainers"):  # never in one process
                command = [sys.executable, __file__, part, name, model]
                subprocess.run(command, env=os.environ | CPU_ENVIRONMENT, check=True)


if __name__ == "__main__":
    main()
