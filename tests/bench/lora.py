"""Compares LoRA with full training: parameters, memory of a rank and seconds of an update, on random weights.

    python tests/bench/lora.py                           # both shapes, a few minutes and 14 GB of memory
    python tests/bench/lora.py --shape gemma-3-270m

One rank on CPU, ZeRO 2, float32, rank 8. Each measurement is a process of its own; its peak is the kernel's (VmHWM).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.types import Batch, Columns, Pack, Prompt, Sample

ROOT = Path(__file__).parent.parent.parent
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-3-270m": (
        "gemma3_text",
        {"vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "head_dim": 256}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen2.5-0.5b": (
        "qwen2",
        {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        | {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
}
MODES = {"full": [], "lora": ["policy.lora={rank: 8, alpha: 16}"]}
UPDATES, SAMPLES, TOKENS = 3, 8, 64  # the first update also warms up


def save_model(shape: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlsys.tasks.zigzag import make_tokenizer

    family, sizes = SHAPES[shape]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def measure(folder: str, *overrides: str) -> dict[str, float]:
    """Makes updates in this process."""
    from rlsys.checks import load_checked
    from workers.learner.files.loading import load_policy
    from workers.learner.objective import Objective
    from workers.learner.rendezvous import join_process_group
    from workers.learner.zero import ZeroEngine, import_deepspeed
    from workers.start.ports import free_port

    base = [f"model.path={folder}", "policy.ranks=1", "reference.kl_coef=0", "policy.tokens_per_pack=1024"]
    config = load_checked(ROOT / "configs" / "tiny_cpu.yaml", [*base, *overrides])
    import_deepspeed(config, 1)
    join_process_group("cpu", 0, 1, "127.0.0.1", free_port(), seed=0, timeout_s=600)
    packed = load_policy(config, folder)
    trained = sum(p.numel() for p in packed.parameters() if p.requires_grad)
    zero = ZeroEngine(packed, config.policy, 1e-6)
    objective, [packs] = Objective(config, zero.engine.device), random_packs()
    for _ in range(UPDATES):
        began = time.perf_counter()
        objective.start_minibatch(0.0)
        zero.minimize(packs, objective, 1e-6, objective.slopes)
        seconds = time.perf_counter() - began
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
    return {"parameters": float(sum(p.numel() for p in packed.parameters())), "trained": trained} | {
        "peak": peak,
        "seconds": seconds,
    }


def random_packs() -> list[list[Pack]]:
    """Samples of two prompts."""
    from rlsys.batching.packing import pack

    rng = np.random.default_rng(0)
    prompts = [Prompt(f"p{g}", "", "", rng.integers(2, 999, TOKENS).tolist(), {}) for g in range(2)]
    samples = [
        Sample(
            f"p{i % 2}", i, "", rng.integers(2, 999, TOKENS).astype(np.int32), np.zeros(TOKENS, np.float32), "stop", 0
        )
        for i in range(SAMPLES)
    ]
    batch = Batch(prompts, samples, np.arange(SAMPLES) % 2, np.zeros(SAMPLES, np.float32), [{}] * SAMPLES)
    total = SAMPLES * TOKENS
    columns = Columns(advantages=rng.normal(size=total).astype(np.float32), old=np.zeros(total, np.float32))
    weights = np.full(total, 1 / total, np.float32)
    return pack(batch, range(SAMPLES), ranks=1, tokens_per_pack=1024, columns=columns, weights=weights)


def compare(shape: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save = f"import lora; from pathlib import Path; lora.save_model({shape!r}, Path({folder!r}))"
        subprocess.run([sys.executable, "-c", save], check=True, cwd=Path(__file__).parent, capture_output=True)
        print_updates(shape, {mode: run_child(folder, overrides) for mode, overrides in MODES.items()})


def print_updates(shape: str, results: dict[str, dict[str, float]]) -> None:
    full, lora = results["full"], results["lora"]
    print(
        f"{shape}: {full['parameters']:,.0f} parameters, of which LoRA trains {lora['trained'] / full['parameters']:.2%}"
    )
    for mode, r in results.items():
        print(f"    {mode}: peak {r['peak'] / 2**30:.2f} GiB, update {r['seconds']:.2f} s")
    print(f"    LoRA / full: memory {lora['peak'] / full['peak']:.2f}, time {lora['seconds'] / full['seconds']:.2f}")


def run_child(folder: str, overrides: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", folder, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
    else:
        for shape in options.shape or SHAPES:
            compare(shape)


if __name__ == "__main__":
    main()
