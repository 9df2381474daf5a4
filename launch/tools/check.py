"""`rlsys check`: does an update depend on how it is computed?

It computes one mini-batch with several rank counts, sequence parallelism, ZeRO stages and pack budgets, and episodes also cut in other
ways. The gradients may differ only by rounding, as much as the dtype explains: token weights are decided over the whole
mini-batch before it is split. Prompts are the run's own. Completions and turns are random tokens, so no engine is needed.
"""

import contextlib
import tempfile
import time
from collections.abc import Collection, Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from launch import datasets
from launch.bundles import format_count
from launch.printing import make_table, number_column, print_line, text_column
from rlsys.batching import minibatches
from rlsys.batching.packing import pack, unpack
from rlsys.config.schema import Config
from rlsys.episodes.settings import plays
from rlsys.errors import ConfigError
from rlsys.runs.progress import Progress
from rlsys.seeds import derive_seed
from rlsys.types import Batch, Columns, Floats, Pack, Prompt, Sample, join_turns

PROMPTS, SAMPLES, LONGEST = 8, 4, 256  # of the mini-batch; tokens of its longest completion
STAGES = (0, 1, 2, 3)
TURNS = 5  # of an episode, at most
CUTS = 20  # other cuts of the same episodes
# Largest relative difference of gradients: of all parameters as one vector, and of any one parameter. Another order of
# addition changes a float32 sum by about 1e-7. In bfloat16, activations and each pack's gradient are rounded to 4e-3:
# the tiny model's gradients differ by 0.023 and 0.032. Without the shortest of its 32 samples they differ by 0.075 and 0.1.
TOLERANCES = {"float32": (1e-5, 1e-4), "bfloat16": (0.05, 0.08)}


@dataclass(frozen=True)
class CheckedUpdate:
    """One way to compute the update, and how its gradient differs from the reference."""

    ranks: int
    sharing: int  # ranks that share each pack
    stage: int  # of ZeRO
    tokens_per_pack: int
    loss: float
    total_difference: float
    largest_difference: float
    largest_in: str  # the parameter with the largest difference
    cuts: int = 0  # other cuts of the episodes, of which this is the one that differs most; 0: as they were played

    def within_tolerance(self, dtype: str, loss: float) -> bool:
        total, largest = TOLERANCES[dtype]
        same_loss = abs(self.loss - loss) <= total * max(1.0, abs(loss))
        return self.total_difference <= total and self.largest_difference <= largest and same_loss


def check(config: Config, console: Console) -> int:
    """Returns the exit code: 0 if all gradients agree."""
    config = replace(config, eval=replace(config.eval, datasets={}))
    datasets.peek(config)
    from launch.models import find_control_tokens, find_model, load_limits, load_tokenizer
    from launch.ray_session.connect import ray_session
    from workers.fleet.watchdog import Watchdog

    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="rlsys-check-") as logs,
        Progress(console, 0) as progress,
        ray_session(config, Path(logs)) as session,
    ):
        model = find_model(config.model.path, config, progress.note)
        tokenizer, limits = load_tokenizer(model, config), load_limits(model, config)
        prompts = datasets.load(config, tokenizer, limits, progress.note).train.take(0, PROMPTS)
        batch = random_batch(config, prompts, min(filter(None, (len(tokenizer), limits.vocabulary))))
        trial = UpdateTrial(config, batch, find_control_tokens(config, tokenizer, limits.vocabulary))
        gpus = int(session.ray.cluster_resources().get("GPU", 0)) if config.cluster.device == "gpu" else None
        if gpus == 0:
            raise ConfigError("cluster.device is gpu, but the cluster has none. `ray status` shows what there is.")
        watchdog = Watchdog(Path(logs), note=progress.note)
        with session.monitored(watchdog.stop):
            counts = rank_counts(config.policy.ranks, gpus)
            updates = list(compute_updates(trial, session, watchdog, model, counts))
    return print_updates(trial, updates, time.monotonic() - began, console)


class UpdateTrial:
    """A mini-batch, with the columns and token weights that its gradient depends on."""

    def __init__(self, config: Config, batch: Batch, control_tokens: Collection[int] = ()):
        self.config, self.batch = config, batch
        self.members = list(range(len(batch.samples)))
        self.weights = minibatches.loss_weights(config, batch, self.members, control_tokens)
        self.columns = Columns()

    @property
    def input_lengths(self) -> list[int]:
        """Tokens of each sequence as an input, with all that its episode says: without its last token."""
        samples = zip(self.batch.groups, self.batch.samples, strict=True)
        return [len(self.batch.prompts[group].tokens) + len(s.sequence) - 1 for group, s in samples]

    def cut_again(self, number: int) -> "UpdateTrial":
        """The same mini-batch, whose turns say themselves what some of those before them had said."""
        rng = np.random.default_rng(derive_seed(self.config.run.seed, "check", "cut", number))
        trial = copy(self)
        trial.batch = replace(self.batch, samples=[cut_again(sample, rng) for sample in self.batch.samples])
        return trial

    def packs(self, ranks: int, budget: int) -> list[list[Pack]]:
        return pack(
            self.batch, self.members, ranks=ranks, tokens_per_pack=budget, columns=self.columns, weights=self.weights
        )

    def fill_columns(self, scored: Floats) -> None:
        """Sets log-probs near the scored ones, as if this model had generated the samples.

        Ratios are then about 1 and stay inside a clip of 0.2. At its edge, rounding alone would decide whether a token
        counts.
        """
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
        self.columns = minibatches.weigh_other_terms(self.config, self.batch, self.members, self.columns)


def random_batch(config: Config, prompts: list[Prompt], vocabulary: int) -> Batch:
    """Random completions of all lengths, the same in every call. `rewards` holds random advantages."""
    rng = np.random.default_rng(derive_seed(config.run.seed, "check"))
    longest = min(config.rollout.max_new_tokens * (TURNS if plays(config) else 1), LONGEST)
    samples = [
        Sample(p.uid, i, "", rng.integers(0, vocabulary, n).astype(np.int32), np.zeros(n, np.float32), "stop", 0)
        for p in prompts
        for i in range(SAMPLES)
        for n in [int(rng.integers(1, longest + 1))]
    ]
    if plays(config):
        samples = [random_episode(sample, vocabulary, rng) for sample in samples]
    groups = np.repeat(np.arange(len(prompts)), SAMPLES)
    return Batch(prompts, samples, groups, rng.normal(size=len(samples)).astype(np.float32), [{} for _ in samples])


def random_episode(sample: Sample, vocabulary: int, rng: np.random.Generator) -> Sample:
    """The same own tokens in several turns, some of which go on from an earlier one or begin anew."""
    places = sorted({0, *rng.integers(0, len(sample.tokens), TURNS - 1).tolist()})
    turns = []
    for turn, (start, end) in enumerate(pairwise([*places, len(sample.tokens)])):
        after = int(rng.integers(-1, turn)) if turn and rng.random() < 0.5 else turn - 1
        turns.append((rng.integers(0, vocabulary, int(rng.integers(1, 5))).tolist(), after, part(sample, start, end)))
    return join_turns(turns, sample)


def cut_again(sample: Sample, rng: np.random.Generator) -> Sample:
    """The same turns after the same tokens, of which each observation may have more."""
    turns, own = list(zip(sample.turns, sample.continued_turns, strict=True)), 0
    cut = []
    for (observed, own_tokens), after in turns:
        observation = observed.tolist()
        while after >= 0 and rng.random() < 0.5:
            (earlier, written), before = turns[after]
            observation, after = [*earlier.tolist(), *written.tolist(), *observation], before
        cut.append((observation, after, part(sample, own, own + len(own_tokens))))
        own += len(own_tokens)
    return join_turns(cut, sample)


def part(sample: Sample, start: int, end: int) -> Sample:
    tokens, logprobs = sample.tokens[start:end], sample.logprobs[start:end]
    return replace(sample, tokens=tokens, logprobs=logprobs, observations=())


def pack_budgets(input_lengths: list[int], configured: int) -> list[int]:
    """Three budgets: for the longest sequence only, the configured one, and one that holds all sequences.

    If the configured one holds all sequences, the third is a quarter of all tokens.
    """
    least, total = max(input_lengths), sum(input_lengths)
    return sorted({least, configured, total} if configured < total else {least, max(total // 4, least), configured})


def rank_counts(configured: int, gpus: int | None) -> list[int]:
    """Numbers of ranks to try. `gpus` is None on CPU, where any number fits."""
    return [n for n in sorted({1, 2, configured}) if gpus is None or n <= gpus]


def compute_updates(
    trial: UpdateTrial, session: Any, watchdog: Any, model: str, counts: list[int]
) -> Iterator[CheckedUpdate]:
    """Yields one result after the other. The first gradient of the first ranks is the reference for all."""
    reference: Any = None
    configured = trial.config.policy.tokens_per_pack
    for count in counts:
        with gradient_ranks(trial.config, session, watchdog, count) as ranks:
            sharings = possible_sharings(ranks, model, trial.config.policy.sequence_parallel)
            for stage in STAGES:
                for sharing in sharings:
                    how = f", {sharing} share a pack" * (sharing > 1)
                    watchdog.note(f"{format_count(count, 'rank')}{how}, ZeRO {stage}")
                    ranks.call_all("build", model, stage, sharing)
                    ranks.share_packs(sharing)
                    if reference is None:
                        reference = compute_reference(trial, ranks, watchdog)
                        if plays(trial.config):
                            yield compare_cuts(trial, ranks, stage, configured, reference)
                    for budget in pack_budgets(trial.input_lengths, configured):
                        yield compare(trial, ranks, stage, budget, reference)


def possible_sharings(ranks: Any, model: str, configured: int) -> list[int]:
    """The numbers of ranks to share packs: 1, the configured one, and 2 if the model can."""
    count = len(ranks.actors)
    ranks.call_all("build", model, STAGES[0])
    by_model = [2] if count % 2 == 0 and all(ranks.call_all("can_share", 2)) else []
    return sorted({1, *by_model, *[configured] * (count % configured == 0)})


def compare(trial: UpdateTrial, ranks: Any, stage: int, budget: int, reference: Any) -> CheckedUpdate:
    results = ranks.scatter("compare", trial.packs(ranks.ranks, budget), reference)
    difference, loss = results[0][1], sum(share for share, _ in results)
    parts = difference.total, difference.largest, difference.parameter
    return CheckedUpdate(len(ranks.actors), ranks.sharing, stage, budget, loss, *parts)


def compare_cuts(trial: UpdateTrial, ranks: Any, stage: int, budget: int, reference: Any) -> CheckedUpdate:
    """Returns the cut whose gradient differs most."""
    trials = [trial.cut_again(number) for number in range(CUTS)]
    budget = max(budget, *(max(cut.input_lengths) for cut in trials))
    updates = [compare(cut, ranks, stage, budget, reference) for cut in trials]
    return replace(max(updates, key=lambda update: update.total_difference), cuts=CUTS)


def compute_reference(trial: UpdateTrial, ranks: Any, watchdog: Any) -> Any:
    """Fills the columns of the trial. Returns a Ray reference: a large gradient goes from worker to worker only."""
    packs = trial.packs(1, trial.config.policy.tokens_per_pack)
    trial.fill_columns(unpack(packs, ranks.scatter("score", packs), len(trial.members)))
    [packs_of_rank] = trial.packs(1, trial.config.policy.tokens_per_pack)
    loss, gradient = ranks.actors[0].gradient.options(num_returns=2).remote(packs_of_rank)
    watchdog.gather({f"{ranks.role}-0": loss}, "computing the reference")
    return gradient


@contextlib.contextmanager
def gradient_ranks(config: Config, session: Any, watchdog: Any, count: int) -> Iterator[Any]:
    """Starts that many ranks, connected to each other, and ends them afterwards."""
    from launch.cluster import Actors
    from workers.learner.gradients import GradientRank
    from workers.learner.ranks import LearnerGroup
    from workers.start.gpu_environment import rank_environment
    from workers.start.worker_forkserver import MODELS

    config = replace(config, policy=replace(config.policy, ranks=count, sequence_parallel=1))
    cpu = config.cluster.device == "cpu"
    actors = Actors(session, config, watchdog)
    spawn = actors.make_spawner(
        GradientRank,
        lambda _: {} if cpu else {"num_gpus": 1},
        rank_environment(config),
        lambda name: [int(name.rpartition("-")[2])],
        forked_by=MODELS,
    )
    watchdog.note(f"starting {format_count(count, 'rank')}")
    try:
        ranks = LearnerGroup(f"gradient-of-{count}", count, config, spawn, watchdog)
        ranks.start_ranks()
        yield ranks
    finally:
        actors.kill_all()


def print_updates(trial: UpdateTrial, updates: list[CheckedUpdate], seconds: float, console: Console) -> int:
    """Prints what a bug report needs. Returns the exit code."""
    c, dtype = trial.config, trial.config.policy.dtype
    reference = (1, 0, c.policy.tokens_per_pack, 0)
    [loss] = [u.loss for u in updates if (u.ranks, u.stage, u.tokens_per_pack, u.cuts) == reference]
    cut = ("cuts",) * any(u.cuts for u in updates)
    numbers = ("share", "ZeRO", "budget", *cut, "loss", "gradient", "largest", "")
    table = make_table(number_column("ranks"), *numbers, text_column("in"), gap=1)
    for u in updates:
        good = u.within_tolerance(dtype, loss)
        figures = f"{u.loss:.6f}", f"{u.total_difference:.1e}", f"{u.largest_difference:.1e}"
        parameter = u.largest_in.removeprefix("lm.").removeprefix("model.").removesuffix(".weight")
        parameter = parameter.removeprefix("layers.")  # what is left fits eighty columns
        style = None if good else "red"
        way = str(u.ranks), str(u.sharing), str(u.stage), f"{u.tokens_per_pack:,}"
        table.add_row(*way, *cut and (str(u.cuts or ""),), *figures, "✓" if good else "✗", parameter, style=style)
    console.print()
    console.print(table)
    total, largest = TOLERANCES[dtype]
    tokens, samples = int(trial.batch.lengths.sum()), len(trial.members)
    for text in (
        f"\n{c.model.path}, policy.dtype {dtype}: {samples} sequences, {tokens} completion tokens, {seconds:.0f} s",
        f"reference: 1 rank, ZeRO 0, budget {c.policy.tokens_per_pack:,} (policy.tokens_per_pack)",
        "share: ranks that share each pack (policy.sequence_parallel)",
        *["cuts: how many other cuts of the same episodes were tried; the figures are of the worst"] * bool(cut),
        f"gradient: relative difference of all parameters, at most {total:g}; largest: of one parameter, {largest:g}",
    ):
        print_line(console, text, "dim")
    bad = sum(not u.within_tolerance(dtype, loss) for u in updates)
    differ = f"✗ {bad} of {len(updates)} ways to compute the update give another one"
    agree = f"✓ all {len(updates)} ways to compute the update give the same one"
    print_line(console, differ if bad else agree, "red" if bad else "green")
    return 1 if bad else 0
