"""How near scoring and updating come to what this machine's matrix product does, and what is gained by computing less:
a group's prompt once, and no samples that teach nothing; and by compiled layers. One rank, one thread, under DeepSpeed as in a run.

    python tests/bench/compute.py          # about four minutes

Times are of the process's own CPU, and what is compared is computed in turn, so that a busy machine does little harm.
"""

import functools
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.batching.minibatches import drop_zero_advantage, split_into_mini_batches
from rlsys.batching.packing import pack
from rlsys.checks import load_checked
from rlsys.config.schema import Config
from rlsys.types import Batch, Columns, Ints, Pack, Prompt, Sample
from workers.learner.objective import Objective
from workers.learner.zero import ZeroEngine

CONFIG = Path(__file__).parent.parent.parent / "configs" / "tiny_cpu.yaml"
ROUNDS = 5
VOCABULARY = 64
# name → hidden size, layers, intermediate size; and tokens of a completion: mean of an exponential, and the most
MODELS = {"8 M": ((256, 8, 1024), (60, 128)), "0.6 M": ((128, 3, 384), (20, 32))}


@dataclass(frozen=True)
class Trial:
    config: Config
    zero: ZeroEngine
    objective: Objective
    parameters: int

    def score(self, packs: list[Pack]) -> None:
        list(self.zero.forward_all(packs))

    def update(self, packs: list[Pack]) -> None:
        self.objective.start_minibatch(0.0)
        self.zero.minimize(packs, self.objective, 0.0, self.objective.slopes)

    def both(self, packs: list[Pack]) -> None:
        self.score(packs)
        self.update(packs)

    def needed(self, packs: list[Pack], passes: int) -> float:
        """Floating-point operations of the matrix products, attention's included, each prompt once. `passes` 1: forward, 3: both."""
        settings, flops = self.config_of_model, 0.0
        for p in packs:
            flops += 2 * self.parameters * len(p.tokens)
            flops += 4 * settings.hidden_size * settings.num_hidden_layers * p.pairs
        return passes * flops

    @property
    def config_of_model(self) -> Any:  # of transformers
        return self.zero.engine.module.lm.config


def model_of(name: str, folder: Path) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    (hidden, layers, inner), _ = MODELS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def trial_of(model: str, *overrides: str) -> Trial:
    from workers.learner.files.loading import load_packed

    config = load_checked(
        CONFIG, ["policy.ranks=1", "trainer.updates_per_step=1", "trainer.epochs_per_step=1", *overrides]
    )
    packed = load_packed(config, model)
    parameters = sum(p.numel() for p in packed.parameters())
    zero = ZeroEngine(packed, config.policy, config.policy.lr)
    return Trial(config, zero, Objective(config, zero.engine.device), parameters)


def made_up(groups: int, each: int, prompt: int, lengths: Callable[[np.random.Generator], int]) -> Batch:
    rng = np.random.default_rng(0)

    def tokens(n: int) -> Ints:
        return rng.integers(2, VOCABULARY, n).astype(np.int32)

    prompts = [Prompt(f"p{g}", "made", "", tokens(prompt).tolist(), {}) for g in range(groups)]
    samples = [
        Sample(p.uid, i, "", tokens(n), -rng.random(n, dtype=np.float32), "stop", 0)
        for p in prompts
        for i in range(each)
        for n in [lengths(rng)]
    ]
    rewards = rng.normal(size=len(samples)).astype(np.float32)
    return Batch(prompts, samples, np.repeat(np.arange(groups), each), rewards, [{} for _ in samples])


def packs_of(
    trial: Trial, batch: Batch, *, share: bool = True, silent: float = 0.0, leave_out: bool = True
) -> list[Pack]:
    """One mini-batch. A share `silent` of the groups has no advantage."""
    of_groups = np.arange(len(batch.prompts)) >= round(silent * len(batch.prompts))
    columns = Columns(advantages=np.repeat(batch.rewards * of_groups[batch.groups], batch.lengths))
    [mini] = split_into_mini_batches(trial.config, 1, batch)
    mini = drop_zero_advantage(trial.config, batch, mini, columns) if leave_out else mini
    budget = trial.config.policy.tokens_per_pack
    [packs] = pack(
        batch, mini.members, ranks=1, tokens_per_pack=budget, columns=columns, weights=mini.weights, share_prompts=share
    )
    return packs


def in_turn(works: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """CPU seconds of each, in every round; one round before is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for i in range(ROUNDS + 1):
        for name, work in works.items():
            began = time.process_time()
            work()
            if i:
                seconds[name].append(time.process_time() - began)
    return seconds


def median_and_range(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def share_of_peak(name: str, trial: Trial) -> None:
    import torch

    _, (mean, most) = MODELS[name]
    batch = made_up(16, 8, 16, lambda rng: int(min(most, 1 + rng.exponential(mean))))
    packs = packs_of(trial, batch)
    a, b = torch.randn(2, 2048, 2048)
    multiply = 2 * 2048**3
    seconds_of = in_turn(
        {"peak": lambda: torch.mm(a, b), "score": lambda: trial.score(packs), "update": lambda: trial.update(packs)}
    )
    for doing, passes in (("score", 1), ("update", 3)):
        needed = trial.needed(packs, passes)
        shares = [needed / s / (multiply / peak) for s, peak in zip(seconds_of[doing], seconds_of["peak"], strict=True)]
        seconds, peak = statistics.median(seconds_of[doing]), multiply / statistics.median(seconds_of["peak"]) / 1e9
        print(
            f"{name}, {sum(len(p.tokens) for p in packs)} tokens, {doing}: {seconds:.3f} s, "
            f"{median_and_range(shares)} of a matrix product's {peak:.0f} GFLOP/s",
            flush=True,
        )


def ratio(title: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    seconds = in_turn({"before": before, "after": after})
    ratios = [b / a for b, a in zip(seconds["before"], seconds["after"], strict=True)]
    print(f"{title}: {median_and_range(ratios)} × as fast", flush=True)


def compiled(trial: Trial, model: str) -> None:
    batch = made_up(16, 8, 16, lambda rng: int(min(128, 1 + rng.exponential(60))))
    for dtype in ("float32", "bfloat16"):
        as_it_is = trial if dtype == "float32" else trial_of(model, f"policy.dtype={dtype}")
        other = trial_of(model, f"policy.dtype={dtype}", "policy.compile=true")
        packs = packs_of(trial, batch)
        before, after = (functools.partial(t.update, packs) for t in (as_it_is, other))
        ratio(f"8 M in {dtype}, layers compiled, update", before, after)


def measure(name: str) -> None:
    import deepspeed
    import torch

    from workers.learner.zero import import_deepspeed

    import_deepspeed(load_checked(CONFIG), 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(name, Path(folder))
        trial = trial_of(model)
        if name == "8 M":
            compiled(trial, model)
    share_of_peak(name, trial)
    if name == "8 M":
        batch = made_up(4, 8, 256, lambda rng: 64)
        unshared, shared = packs_of(trial, batch, share=False), packs_of(trial, batch)
        title = "8 M, prompt 256, completion 64, group 8, score and update, each prompt once"
        ratio(title, lambda: trial.both(unshared), lambda: trial.both(shared))
        batch = made_up(16, 8, 16, lambda rng: 60)
        every = packs_of(trial, batch, silent=0.5, leave_out=False)
        some = packs_of(trial, batch, silent=0.5)
        ratio(
            "8 M, half of the groups without advantage, update", lambda: trial.update(every), lambda: trial.update(some)
        )
    torch.distributed.destroy_process_group()


def main() -> None:
    if len(sys.argv) == 2:
        measure(sys.argv[1])
        return
    import subprocess

    for name in MODELS:
        subprocess.run([sys.executable, __file__, name], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    main()
