"""Two evaluations of the same prompts, side by side: which is better, and whether the prompts can tell."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from launch.printing import end, say, table
from rlsys.config.schema import ConfigError
from rlsys.evaluation.significance import interval, mcnemar, sign_flip
from rlsys.runs.samples import Saved, saved_samples
from rlsys.text import visible

Array = NDArray[np.float64]
SEED = 0


@dataclass(frozen=True)
class Answers:
    """What one side has of one prompt: its samples, at least one of them judged."""

    samples: list[Saved]

    @property
    def scores(self) -> list[float]:
        return [s.verdict.score for s in self.samples if s.verdict.score is not None]

    @property
    def mean(self) -> float:
        return float(np.mean(self.scores))

    @property
    def first(self) -> Saved:
        return self.samples[0]


@dataclass(frozen=True)
class Side:
    file: Path
    answers: dict[str, Answers]  # by uid
    unjudged: int  # prompts that no verdict is left of

    @property
    def what(self) -> str:
        samples = sum(len(a.samples) for a in self.answers.values())
        return f"{self.file}: {len(self.answers)} prompts, {samples} samples"


def compare(a: str, b: str, step: int | None, lines: int, console: Console) -> None:
    sides = read(samples_of(a, step)), read(samples_of(b, step))
    pairs, how = matched(*sides)
    for name, side in zip("AB", sides, strict=True):
        say(console, f"{name}  {side.what}")
        if side.unjudged:
            say(console, f"   prompts of {name} without a verdict, left out: {side.unjudged}", "yellow")
    console.print()
    say(console, f"prompts in both: {len(pairs)}, {how}")
    for i, (name, side) in enumerate(zip("AB", sides, strict=True)):
        paired = {saved.sample.uid for pair in pairs for saved in pair[i].samples}  # several may have one text
        if left := len(side.answers) - len(paired):
            say(console, f"prompts in {name} only, which say nothing here: {left} of {len(side.answers)}", "yellow")
    figures(pairs, console)
    if lines:
        changes(pairs, lines, console)


def samples_of(target: str, step: int | None) -> Path:
    """The samples of a run's evaluation, or the file itself."""
    place = Path(target).expanduser()
    if place.is_file():
        return place
    if not place.is_dir():
        raise ConfigError(f"{target} does not exist. Give a run, or a .parquet file of samples.")
    there = sorted((place / "samples").glob("eval-*.parquet"))
    if not there:
        raise ConfigError(f"{target} holds no evaluation: no samples/eval-*.parquet. Were there eval.datasets?")
    if step is None:
        return there[-1]
    if (wanted := place / "samples" / f"eval-{step:06d}.parquet") not in there:
        steps = ", ".join(str(int(p.stem.partition("-")[2])) for p in there)
        raise ConfigError(f"{target} was not evaluated at step {step}, but at {steps}.")
    return wanted


def read(file: Path) -> Side:
    by_uid: dict[str, list[Saved]] = defaultdict(list)
    for saved in saved_samples(file):
        by_uid[saved.sample.uid].append(saved)
    answers = {uid: Answers(samples) for uid, samples in by_uid.items()}
    judged = {uid: a for uid, a in answers.items() if a.scores}
    if not judged:
        raise ConfigError(f"{file} holds no sample with a score.")
    return Side(file, judged, len(answers) - len(judged))


def matched(a: Side, b: Side) -> tuple[list[tuple[Answers, Answers]], str]:
    """Pairs of the same prompt, and by what they were found: uid where it stands for the same prompt on both sides, else the text."""
    shared = [uid for uid in a.answers if uid in b.answers]
    agreed = {uid: (a.answers[uid], b.answers[uid]) for uid in shared if same(a.answers[uid], b.answers[uid])}
    rest = [[x for uid, x in side.answers.items() if uid not in agreed] for side in (a, b)]
    # Where each has its chat, templates of two models make no difference.
    chats = all(x.first.prompt.messages for side in rest for x in side)
    ours, theirs = by_text(rest[0], chats), by_text(rest[1], chats)
    alike = [(ours[text], theirs[text]) for text in ours if text in theirs]
    found = {"uid": len(agreed), "the text of the prompt": len(alike)}
    if ways := [way for way in found if found[way]]:
        how = f"matched by {ways[0]}" if len(ways) == 1 else ", ".join(f"{n} matched by {w}" for w, n in found.items())
        return [*agreed.values(), *alike], how
    uid = next(iter(shared or a.answers))
    other = b.answers.get(uid) or next(iter(b.answers.values()))
    raise ConfigError(
        f"{a.file} and {b.file} share no prompt"
        + (f", though {len(shared)} uids: {uid} is " if shared else f": {uid} of the first is ")
        + f"{a.answers[uid].first.prompt.text[-60:]!r}, {other.first.sample.uid} of the other is "
        f"{other.first.prompt.text[-60:]!r}. Evaluate both on the same data."
    )


def same(a: Answers, b: Answers) -> bool:
    """The same text, or the same chat, which templates of two models make two texts of."""
    ours, theirs = a.first.prompt, b.first.prompt
    return ours.text == theirs.text or (ours.messages is not None and ours.messages == theirs.messages)


def by_text(some: list[Answers], chats: bool) -> dict[str, Answers]:
    found: dict[str, list[Saved]] = defaultdict(list)
    for answers in some:
        prompt = answers.first.prompt
        found[json.dumps(prompt.messages) if chats else prompt.text] += answers.samples
    return {text: Answers(samples) for text, samples in found.items()}


def figures(pairs: list[tuple[Answers, Answers]], console: Console) -> None:
    """Per source, and over all where there are several: both means, their difference, and what chance would do."""
    by_source: dict[str, list[tuple[Answers, Answers]]] = defaultdict(list)
    for pair in pairs:
        by_source[pair[0].first.prompt.source].append(pair)
    groups = dict(sorted(by_source.items())) | ({"all": pairs} if len(by_source) > 1 else {})
    told = table("source", "prompts", "A", "B", "B - A", "95 % interval", "p", "won/lost/tied")
    for name, members in groups.items():
        before, after = (np.array([pair[i].mean for pair in members]) for i in (0, 1))
        change = after - before
        low, high = interval(change, seed=SEED)
        p = sign_flip(change, seed=SEED)
        won, lost = int((change > 0).sum()), int((change < 0).sum())
        told.add_row(
            visible(name),
            str(len(members)),
            *(f"{before.mean():.3f}", f"{after.mean():.3f}", f"{change.mean():+.3f}", f"{low:+.3f} {high:+.3f}"),
            *(f"{p:.2g}", f"{won}/{lost}/{len(members) - won - lost}"),
        )
    console.print()
    console.print(told)
    console.print()
    say(console, verdict(change, p))  # of the last line, which is of all
    say(console, "p is of the paired sign-flip test over prompts.", "dim")
    if all(len(x.scores) == 1 and x.scores[0] in (0, 1) for pair in pairs for x in pair):
        say(console, f"One answer each, right or wrong: McNemar's exact test says p = {mcnemar(won, lost):.2g}.", "dim")


def verdict(change: Array, p: float) -> str:
    """The whole in a sentence."""
    if not change.any():
        return "A and B score alike on every prompt."
    if p < 0.05:
        return f"{'B' if change.sum() > 0 else 'A'} is better (p = {p:.2g})."
    return f"No difference that {len(change)} prompts can tell from chance (p = {p:.2g})."


def changes(pairs: list[tuple[Answers, Answers]], lines: int, console: Console) -> None:
    """The prompts whose mean score moved most, with a completion of each side."""
    moved = sorted(
        (pair for pair in pairs if pair[0].mean != pair[1].mean), key=lambda pair: pair[1].mean - pair[0].mean
    )
    lost, won = moved[: lines - lines // 2], moved[::-1][: lines // 2]
    for a, b in lost + [pair for pair in reversed(won) if pair not in lost]:
        console.print()
        say(console, f"{a.first.sample.uid}: {a.mean:.3g} of A, {b.mean:.3g} of B")
        for name, text in ("prompt", a.first.prompt.text), ("A", a.first.sample.text), ("B", b.first.sample.text):
            say(console, f"  {name:<6} {end(text, console.width - 10)}", "dim" if name == "prompt" else "")
