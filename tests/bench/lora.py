"""Compares LoRA with full training: parameters, memory of a rank, seconds of an update and of a sync, on random weights.

    python tests/bench/lora.py                           # both shapes, a few minutes and 14 GB of memory
    python tests/bench/lora.py --shape gemma-3-270m --only sync

One rank on CPU, ZeRO 2, float32, rank 8. Each measurement is a process of its own; its peak is the kernel's (VmHWM).
A sync goes to one engine through shared memory, and ends when the engine has verified its weights.
"""

import argparse
import json
import statistics
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
SYNCS = {"all weights": MODES["lora"], "adapters alone": [*MODES["lora"], "sync.what=adapter"]}
ROUNDS = 5  # and one before, which touches memory for the first time
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


def measure_sync(folder: str, *overrides: str) -> dict[str, float]:
    """Sends weights from a rank to an engine: the bytes that travel, and seconds until they are loaded and verified."""
    from actors import call, spawn

    from launch.ray_session.connect import ray_session
    from rlsys.checks import load_checked
    from workers.learner.policy import PolicyRank
    from workers.rollout.engine_settings import CPU_ENVIRONMENT
    from workers.rollout.rollout_worker import RolloutWorker
    from workers.sync.layout import aligned_bytes

    base = [f"model.path={folder}", "policy.ranks=1", "policy.threads=1", "rollout.engines=1", "reference.kl_coef=0"]
    config = load_checked(ROOT / "configs" / "tiny_cpu.yaml", [*base, *overrides])
    with tempfile.TemporaryDirectory() as logs, ray_session(config, Path(logs)) as session:
        ray, start = session.ray, (folder, "shared_memory")
        rank = spawn(PolicyRank, config, 0, Path(logs), {"OMP_NUM_THREADS": "1"})
        engine = spawn(RolloutWorker, config, 0, Path(logs), CPU_ENVIRONMENT)
        address, port = ray.get(call(rank, PolicyRank.rendezvous_address))
        ray.get([call(rank, PolicyRank.start, address, port, *start), call(engine, RolloutWorker.start, *start, 7)])
        info = ray.get(call(rank, PolicyRank.connection_info))
        ray.get([call(rank, PolicyRank.connect, info), call(engine, RolloutWorker.connect, info)])
        seconds = [sync(ray, rank, engine, info["parts"], version) for version in range(ROUNDS + 1)][1:]
        sent = sum(aligned_bytes(slot[:3]) for bucket in info["buckets"] for slot in bucket)
    loaded, verified = (statistics.median(column) for column in zip(*seconds, strict=True))
    return {"bytes": sent, "loaded": loaded, "verified": verified}


def sync(ray: Any, rank: Any, engine: Any, parts: int, version: int) -> tuple[float, float]:
    """Seconds until the engine may sample, and until it has verified its weights."""
    from actors import call

    from workers.learner.policy import PolicyRank
    from workers.rollout.rollout_worker import RolloutWorker
    from workers.sync.verify import combine_ranks

    began = time.perf_counter()
    sending = [[call(rank, PolicyRank.send, part)] for part in range(parts)]
    fingerprints = call(rank, PolicyRank.fingerprints)
    loading = call(engine, RolloutWorker.load_weights, sending, version)
    ray.get(loading)
    loaded = time.perf_counter()
    expected = combine_ranks([ray.get(fingerprints)])
    difference = ray.get(call(engine, RolloutWorker.verify_weights, version, expected))
    assert not difference, difference
    return loaded - began, time.perf_counter() - began


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


def compare(shape: str, only: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save = f"import lora; from pathlib import Path; lora.save_model({shape!r}, Path({folder!r}))"
        subprocess.run([sys.executable, "-c", save], check=True, cwd=Path(__file__).parent, capture_output=True)
        if only != "sync":
            print_updates(shape, {m: run_child("--measure", folder, overrides) for m, overrides in MODES.items()})
        if only != "updates":
            print_syncs(shape, {m: run_child("--measure-sync", folder, overrides) for m, overrides in SYNCS.items()})


def print_updates(shape: str, results: dict[str, dict[str, float]]) -> None:
    full, lora = results["full"], results["lora"]
    print(
        f"{shape}: {full['parameters']:,.0f} parameters, of which LoRA trains {lora['trained'] / full['parameters']:.2%}"
    )
    for mode, r in results.items():
        print(f"    {mode}: peak {r['peak'] / 2**30:.2f} GiB, update {r['seconds']:.2f} s")
    print(f"    LoRA / full: memory {lora['peak'] / full['peak']:.2f}, time {lora['seconds'] / full['seconds']:.2f}")


def print_syncs(shape: str, results: dict[str, dict[str, float]]) -> None:
    print(f"{shape}: a sync, median of {ROUNDS}")
    for what, r in results.items():
        seconds = f"loaded after {r['loaded']:.2f} s, verified after {r['verified']:.2f} s"
        print(f"    {what}: {r['bytes'] / 2**20:,.1f} MiB, {seconds}", flush=True)


def run_child(kind: str, folder: str, overrides: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, kind, folder, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--only", choices=["updates", "sync"])
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--measure-sync", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
    elif options.measure_sync:
        print(json.dumps(measure_sync(*options.measure_sync)))
    else:
        for shape in options.shape or SHAPES:
            compare(shape, options.only)


if __name__ == "__main__":
    main()
