"""Whether an update depends on how it is computed: the same mini-batch by ranks, ZeRO stages and pack budgets.

It may not: token weights are decided over the whole mini-batch before anything is cut up. Rounding is all that is left, and how
much of that there may be follows from the dtype. Prompts are the run's own; completions are random tokens, so no engine is needed.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from launch import datasets
from launch.printing import print_line
from rlsys.config.schema import Config, ConfigError
from rlsys.packs import minibatches
from rlsys.packs.packing import pack, unpack
from rlsys.runs.progress import Progress
from rlsys.seeds import derive_seed
from rlsys.types import Batch, Columns, Floats, Pack, Prompt, Sample

PROMPTS, SAMPLES, LONGEST = 8, 4, 256  # of the mini-batch; tokens of its longest completion
STAGES = (0, 1, 2, 3)
# How far gradients may be apart: as one vector, and for the parameter where it is most. Adding in another order changes about
# 1e-7 of a float32 sum and 4e-3 of a bfloat16 one; a mistake in weights or masks, far more than either.
TOLERANCES = {"float32": (1e-5, 1e-4), "bfloat16": (0.1, 0.25)}


@dataclass(frozen=True)
class CheckedUpdate:
    """One way to compute the update, and what came out."""

    ranks: int
    stage: int
    tokens_per_pack: int  # tokens of a pack, at most
    loss: float
    total_difference: float
    largest_difference: float
    largest_in: str

    def within_tolerance(self, dtype: str, loss: float) -> bool:
        whole, worst = TOLERANCES[dtype]
        return (
            self.total_difference <= whole
            and self.largest_difference <= worst
            and abs(self.loss - loss) <= whole * max(1.0, abs(loss))
        )


def check(config: Config, console: Console) -> int:
    """The exit code."""
    config = replace(config, eval=replace(config.eval, datasets={}))
    datasets.peek(config)
    from launch.cluster import find_model, load_tokenizer, load_window
    from launch.ray_session.connect import ray_session
    from workers.supervision.waiting import Watch

    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="rlsys-check-") as logs,
        Progress(console, 0) as progress,
        ray_session(config, Path(logs)) as session,
    ):
        model = find_model(config, progress.note)
        tokenizer, window = load_tokenizer(model, config), load_window(model, config)
        prompts = datasets.load(config, tokenizer, window, progress.note).train.take(0, PROMPTS)
        trial = UpdateTrial(config, random_batch(config, prompts, vocabulary_size(model, tokenizer, config)))
        gpus = int(session.ray.cluster_resources().get("GPU", 0)) if config.cluster.device == "gpu" else None
        if gpus == 0:
            raise ConfigError("cluster.device is gpu, but the cluster has none. `ray status` shows what there is.")
        watch = Watchdog(Path(logs), note=progress.note)
        with session.monitored(watch.stop):
            lines = list(compute_updates(trial, session, watch, model, rank_counts(config.policy.ranks, gpus)))
    return print_updates(trial, lines, time.monotonic() - began, console)


class UpdateTrial:
    """The mini-batch, and all that its gradient depends on."""

    def __init__(self, config: Config, batch: Batch):
        self.config, self.batch = config, batch
        self.members = list(range(len(batch.samples)))
        self.weights = minibatches.loss_weights(config, batch, self.members)
        self.columns = Columns()

    @property
    def input_lengths(self) -> list[int]:
        """Tokens of each sequence in a pack."""
        return [
            len(self.batch.prompts[g].tokens) + n - 1
            for g, n in zip(self.batch.groups, self.batch.lengths, strict=True)
        ]

    def packs(self, ranks: int, budget: int) -> list[list[Pack]]:
        return pack(
            self.batch, self.members, ranks=ranks, tokens_per_pack=budget, columns=self.columns, weights=self.weights
        )

    def fill_columns(self, scored: Floats) -> None:
        """Columns as a step would have them, were the samples this model's: a reference nearby, and ratios about 1, none of them
        at the edge of a clip of 0.2, where rounding alone would decide whether a token counts."""
        rng = np.random.default_rng(derive_seed(self.config.run.seed, "check", "columns"))

        def near(logprobs: Floats) -> Floats:
            return (logprobs + rng.uniform(-0.1, 0.1, len(logprobs))).astype(np.float32)

        rollout = self.batch.split(near(scored))
        samples = [replace(s, logprobs=p) for s, p in zip(self.batch.samples, rollout, strict=True)]
        self.batch = replace(self.batch, samples=samples)
        self.columns = Columns(
            advantages=np.repeat(self.batch.rewards, self.batch.lengths),
            old=near(scored),
            ref=near(scored) if self.config.reference.kl_coef and self.config.reference.kl_in == "loss" else None,
        )


def vocabulary_size(model: str, tokenizer: Any, config: Config) -> int:
    """Ids that both the tokenizer and the embedding have."""
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(model, trust_remote_code=config.model.trust_remote_code)
    return min(len(tokenizer), int(settings.get_text_config().vocab_size))


def random_batch(config: Config, prompts: list[Prompt], symbols: int) -> Batch:
    """Random completions of all lengths, with random advantages, which are in `rewards`; always the same."""
    rng = np.random.default_rng(derive_seed(config.run.seed, "check"))
    longest = min(config.rollout.max_new_tokens, LONGEST)
    samples = [
        Sample(p.uid, i, "", rng.integers(0, symbols, n).astype(np.int32), np.zeros(n, np.float32), "stop", 0)
        for p in prompts
        for i in range(SAMPLES)
        for n in [int(rng.integers(1, longest + 1))]
    ]
    groups = np.repeat(np.arange(len(prompts)), SAMPLES)
    return Batch(prompts, samples, groups, rng.normal(size=len(samples)).astype(np.float32), [{} for _ in samples])


def pack_budgets(inputs: list[int], own: int) -> list[int]:
    """The smallest that fits the longest sequence, the configured one, and one for all; or a middle one, if two are the same."""
    least, total = max(inputs), sum(inputs)
    return sorted({least, own, total} if own < total else {least, max(total // 4, least), own})


def rank_counts(own: int, gpus: int | None) -> list[int]:
    """`gpus` None: on CPU any number of ranks fits."""
    return [n for n in sorted({1, 2, own}) if gpus is None or n <= gpus]


def compute_updates(
    trial: UpdateTrial, session: Any, watch: Any, model: str, counts: list[int]
) -> Iterator[CheckedUpdate]:
    """One line after the other. The first ranks' first answer is what all are compared with."""
    reference: Any = None
    own = trial.config.policy.tokens_per_pack
    for count in counts:
        with gradient_ranks(trial.config, session, watch, count) as ranks:
            for stage in STAGES:
                watch.note(f"{count} {'rank' if count == 1 else 'ranks'}, ZeRO {stage}")
                ranks.call_all("build", model, stage)
                if reference is None:
                    scoring = trial.packs(1, own)
                    trial.fill_columns(unpack(scoring, ranks.scatter("score", scoring), len(trial.members)))
                    # By reference: the gradient of a large model travels from worker to worker.
                    first = ranks.actors[0].gradient.options(num_returns=2).remote(trial.packs(1, own)[0])
                    watch.gather({f"{ranks.role}-0": first[0]}, "computing the reference")
                    reference = first[1]
                for budget in pack_budgets(trial.input_lengths, own):
                    packs = trial.packs(count, budget)
                    answers = ranks.scatter("compare", packs, reference)
                    found, loss = answers[0][1], sum(share for share, _ in answers)
                    yield CheckedUpdate(count, stage, budget, loss, found.total, found.largest, found.parameter)


@contextlib.contextmanager
def gradient_ranks(config: Config, session: Any, watch: Any, count: int) -> Iterator[Any]:
    """So many ranks that have met."""
    from launch.cluster import Actors
    from workers.learner.gradients import GradientRank
    from workers.learner.ranks import LearnerGroup
    from workers.supervision.worker_forkserver import MODELS

    config = replace(config, policy=replace(config.policy, ranks=count))
    cpu = config.cluster.device == "cpu"
    environment = {"OMP_NUM_THREADS": str(config.policy.threads)} if cpu else {}
    actors = Actors(session, config, watch)
    spawn = actors.make_spawner(
        GradientRank,
        lambda _: {} if cpu else {"num_gpus": 1},
        environment,
        lambda name: [int(name.rpartition("-")[2])],
        born=MODELS,
    )
    watch.note(f"starting {count} {'rank' if count == 1 else 'ranks'}")
    try:
        ranks = LearnerGroup(f"gradient-of-{count}", count, config, spawn, watch)
        ranks.start_ranks()
        yield ranks
    finally:
        actors.kill_all()


def print_updates(trial: UpdateTrial, lines: list[CheckedUpdate], seconds: float, console: Console) -> int:
    """What a bug report needs; returns the exit code."""
    c, dtype = trial.config, trial.config.policy.dtype
    [loss] = [
        line.loss
        for line in lines
        if (line.ranks, line.stage, line.tokens_per_pack) == (1, 0, c.policy.tokens_per_pack)
    ]
    found = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for heading in ("ranks", "ZeRO", "budget", "loss", "gradient", "largest", ""):
        found.add_column(heading, justify="right", no_wrap=True)
    found.add_column("in", overflow="fold")
    for line in lines:
        good = line.within_tolerance(dtype, loss)
        figures = (
            f"{line.tokens_per_pack:,}",
            f"{line.loss:.6f}",
            f"{line.total_difference:.1e}",
            f"{line.largest_difference:.1e}",
        )
        name = line.largest_in.removeprefix("lm.").removeprefix("model.")
        style = None if good else "red"
        found.add_row(f"{line.ranks}", f"{line.stage}", *figures, "✓" if good else "✗", name, style=style)
    console.print()
    console.print(found)
    whole, worst = TOLERANCES[dtype]
    tokens, samples = int(trial.batch.lengths.sum()), len(trial.members)
    for text in (
        f"\n{c.model.path}, policy.dtype {dtype}: {samples} sequences, {tokens} completion tokens, {seconds:.0f} s",
        f"compared with 1 rank, ZeRO 0, budget {c.policy.tokens_per_pack:,} (policy.tokens_per_pack)",
        f"gradient: relative difference of all of it, at most {whole:g}; largest: of one parameter, at most {worst:g}",
    ):
        print_line(console, text, "dim")
    bad = sum(not line.within_tolerance(dtype, loss) for line in lines)
    print_line(
        console,
        f"✗ {bad} of {len(lines)} ways to compute the update give another one"
        if bad
        else f"✓ all {len(lines)} ways to compute the update give the same one",
        "red" if bad else "green",
    )
    return 1 if bad else 0
