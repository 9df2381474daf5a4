"""Measures the peak memory of a rank against the length of a sequence, alone and with another rank that shares it.

    python tests/bench/sequences.py                      # 1,024 to 8,192 tokens, about six minutes on two cores
    python tests/bench/sequences.py --lengths 16384 policy.gradient_checkpointing=true

A random model of 9 million parameters in float32, ZeRO 2, one thread per rank. Each measurement has processes of its own;
the peak is the kernel's (VmHWM). Half of a sequence is the prompt.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_models import random_model

from launch.tools.estimates.learner import learner_memory
from launch.tools.estimates.memory import SequenceLengths, total_bytes
from rlsys.checks import load_checked
from rlsys.config.schema import Config
from rlsys.models.lookup import model_shape
from rlsys.types import Batch, Columns, Pack, Prompt, Sample

ROOT = Path(__file__).parent.parent.parent
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 1 << 17, "tie_word_embeddings": True}
UPDATES = 2  # the first one creates Adam's moments


def settings(folder: str, ranks: int, length: int, overrides: list[str]) -> Config:
    options = [f"model.path={folder}", f"policy.ranks={ranks}", f"policy.sequence_parallel={ranks}", "policy.threads=1"]
    options += [f"policy.tokens_per_pack={length}", f"rollout.max_prompt_tokens={length // 2}", "reference.kl_coef=0"]
    options += [f"rollout.max_new_tokens={length // 2}", "algorithm.advantage=raw", "trainer.prompts_per_step=1"]
    options += ["trainer.samples_per_prompt=1", "trainer.updates_per_step=1", "overlong.buffer=0", *overrides]
    return load_checked(ROOT / "configs" / "tiny_cpu.yaml", options)


def measure(config: Config, rank: int, port: int) -> dict[str, float]:
    """Makes updates in this process."""
    from workers.learner.files.loading import load_policy
    from workers.learner.objective import Objective
    from workers.learner.rendezvous import join_process_group
    from workers.learner.zero import ZeroEngine, import_deepspeed

    import_deepspeed(config, config.policy.ranks)
    limit = config.cluster.start_timeout_s
    join_process_group("cpu", rank, config.policy.ranks, "127.0.0.1", port, seed=0, timeout_s=limit)
    zero = ZeroEngine(load_policy(config, config.model.path), config.policy, 1e-6)
    objective, packs = Objective(config, zero.engine.device), one_sequence(config)
    for _ in range(UPDATES):
        began = time.perf_counter()
        objective.start_minibatch(0.0)
        zero.minimize(packs, objective, 1e-6, objective.slopes)
        seconds = time.perf_counter() - began
    status = Path("/proc/self/status").read_text()
    return {"peak": int(status.partition("VmHWM:")[2].split()[0]) << 10, "seconds": seconds}


def one_sequence(config: Config) -> list[Pack]:
    from rlsys.batching.packing import pack

    rng, new = np.random.default_rng(0), config.rollout.max_new_tokens
    prompt = Prompt("p", "", "", rng.integers(2, 4096, config.rollout.max_prompt_tokens).tolist(), {})
    tokens, zeros = rng.integers(2, 4096, new).astype(np.int32), np.zeros(new, np.float32)
    batch = Batch([prompt], [Sample("p", 0, "", tokens, zeros, "stop", 0)], np.zeros(1, np.int64), zeros[:1], [{}])
    columns = Columns(advantages=rng.normal(size=new).astype(np.float32), old=zeros - 8)
    weights = np.full(new, 1 / new, np.float32)
    [packs] = pack(batch, [0], ranks=1, tokens_per_pack=config.policy.tokens_per_pack, columns=columns, weights=weights)
    return packs


def run_ranks(folder: str, ranks: int, length: int, overrides: list[str]) -> dict[str, float]:
    """The figures of rank 0 of `ranks` processes."""
    from workers.start.ports import free_port

    port = str(free_port())
    command = [
        sys.executable,
        __file__,
        "--lengths",
        str(length),
        "--folder",
        folder,
        "--ranks",
        str(ranks),
        "--port",
        port,
    ]
    children = [
        subprocess.Popen([*command, "--rank", str(rank), *overrides], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"{length} tokens on {ranks} ranks: a process failed; its error is above.")
    figures: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return figures


def estimate(config: Config) -> float:
    """The peak that `rlsys plan` expects."""
    half = config.rollout.max_new_tokens
    model, ranks = model_shape(config.model.path)[0], config.policy.ranks
    memory = learner_memory(config, model, "policy", ranks, SequenceLengths(half, half), first=False, has_logits=True)
    return max(
        total_bytes(parts) for moment, parts in memory.host.items() if moment in ("load", "update", "reduce", "step")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,2048,4096,8192", help="tokens, with commas")
    for name in ("folder", "ranks", "rank", "port"):  # of a process that measures
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    lengths = [int(n) for n in arguments.lengths.split(",")]
    if arguments.rank:
        config = settings(arguments.folder, int(arguments.ranks), lengths[0], arguments.overrides)
        print(json.dumps(measure(config, int(arguments.rank), int(arguments.port))))
        return
    with tempfile.TemporaryDirectory() as folder:
        random_model(**SIZES).save_pretrained(folder)
        for length in lengths:
            for ranks in (1, 2):
                figures = run_ranks(folder, ranks, length, arguments.overrides)
                expected = estimate(settings(folder, ranks, length, arguments.overrides))
                print(
                    f"{length:>7,} tokens, {ranks} ranks: peak {figures['peak'] / 2**20:,.0f} MiB, planned over measured "
                    f"{expected / figures['peak']:.2f}, update {figures['seconds']:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
