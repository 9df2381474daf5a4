"""Two evaluations of the same prompts, side by side: which is better, and whether the prompts can tell."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from launch.printing import last_characters, make_table, print_line
from rlsys.config.schema import ConfigError
from rlsys.evaluation.significance import bootstrap_interval, mcnemar_test, sign_flip_test
from rlsys.runs.samples import SavedSample, read_saved_samples
from rlsys.text import escape_control_chars

Array = NDArray[np.float64]
SEED = 0


@dataclass(frozen=True)
class PromptSamples:
    """What one side has of one prompt: its samples, at least one of them judged."""

    samples: list[SavedSample]

    @property
    def scores(self) -> list[float]:
        return [s.verdict.score for s in self.samples if s.verdict.score is not None]

    @property
    def mean(self) -> float:
        return float(np.mean(self.scores))

    @property
    def first(self) -> SavedSample:
        return self.samples[0]


@dataclass(frozen=True)
class Side:
    file: Path
    samples_by_uid: dict[str, PromptSamples]  # by uid
    unjudged: int  # prompts that no verdict is left of

    @property
    def description(self) -> str:
        samples = sum(len(a.samples) for a in self.samples_by_uid.values())
        return f"{self.file}: {len(self.samples_by_uid)} prompts, {samples} samples"


def compare(a: str, b: str, step: int | None, lines: int, console: Console) -> None:
    sides = read_side(find_samples(a, step)), read_side(find_samples(b, step))
    pairs, how = match_prompts(*sides)
    for name, side in zip("AB", sides, strict=True):
        print_line(console, f"{name}  {side.description}")
        if side.unjudged:
            print_line(console, f"   prompts of {name} without a verdict, left out: {side.unjudged}", "yellow")
    console.print()
    print_line(console, f"prompts in both: {len(pairs)}, {how}")
    for i, (name, side) in enumerate(zip("AB", sides, strict=True)):
        paired = {saved.sample.uid for pair in pairs for saved in pair[i].samples}  # several may have one text
        if left := len(side.samples_by_uid) - len(paired):
            print_line(
                console,
                f"prompts in {name} only, which say nothing here: {left} of {len(side.samples_by_uid)}",
                "yellow",
            )
    print_figures(pairs, console)
    if lines:
        print_changes(pairs, lines, console)


def find_samples(target: str, step: int | None) -> Path:
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


def read_side(file: Path) -> Side:
    by_uid: dict[str, list[SavedSample]] = defaultdict(list)
    for saved in read_saved_samples(file):
        by_uid[saved.sample.uid].append(saved)
    answers = {uid: PromptSamples(samples) for uid, samples in by_uid.items()}
    judged = {uid: a for uid, a in answers.items() if a.scores}
    if not judged:
        raise ConfigError(f"{file} holds no sample with a score.")
    return Side(file, judged, len(answers) - len(judged))


def match_prompts(a: Side, b: Side) -> tuple[list[tuple[PromptSamples, PromptSamples]], str]:
    """Pairs of the same prompt, and by what they were found: uid where it stands for the same prompt on both sides, else the text."""
    shared = [uid for uid in a.samples_by_uid if uid in b.samples_by_uid]
    agreed = {
        uid: (a.samples_by_uid[uid], b.samples_by_uid[uid])
        for uid in shared
        if same_prompt(a.samples_by_uid[uid], b.samples_by_uid[uid])
    }
    rest = [[x for uid, x in side.samples_by_uid.items() if uid not in agreed] for side in (a, b)]
    # Where each has its chat, templates of two models make no difference.
    chats = all(x.first.prompt.messages for side in rest for x in side)
    ours, theirs = group_by_text(rest[0], chats), group_by_text(rest[1], chats)
    alike = [(ours[text], theirs[text]) for text in ours if text in theirs]
    found = {"uid": len(agreed), "the text of the prompt": len(alike)}
    if ways := [way for way in found if found[way]]:
        how = f"matched by {ways[0]}" if len(ways) == 1 else ", ".join(f"{n} matched by {w}" for w, n in found.items())
        return [*agreed.values(), *alike], how
    uid = next(iter(shared or a.samples_by_uid))
    other = b.samples_by_uid.get(uid) or next(iter(b.samples_by_uid.values()))
    raise ConfigError(
        f"{a.file} and {b.file} share no prompt"
        + (f", though {len(shared)} uids: {uid} is " if shared else f": {uid} of the first is ")
        + f"{a.samples_by_uid[uid].first.prompt.text[-60:]!r}, {other.first.sample.uid} of the other is "
        f"{other.first.prompt.text[-60:]!r}. Evaluate both on the same data."
    )


def same_prompt(a: PromptSamples, b: PromptSamples) -> bool:
    """The same text, or the same chat, which templates of two models make two texts of."""
    ours, theirs = a.first.prompt, b.first.prompt
    return ours.text == theirs.text or (ours.messages is not None and ours.messages == theirs.messages)


def group_by_text(some: list[PromptSamples], chats: bool) -> dict[str, PromptSamples]:
    found: dict[str, list[SavedSample]] = defaultdict(list)
    for answers in some:
        prompt = answers.first.prompt
        found[json.dumps(prompt.messages) if chats else prompt.text] += answers.samples
    return {text: PromptSamples(samples) for text, samples in found.items()}


def print_figures(pairs: list[tuple[PromptSamples, PromptSamples]], console: Console) -> None:
    """Per source, and over all where there are several: both means, their difference, and what chance would do."""
    by_source: dict[str, list[tuple[PromptSamples, PromptSamples]]] = defaultdict(list)
    for pair in pairs:
        by_source[pair[0].first.prompt.source].append(pair)
    groups = dict(sorted(by_source.items())) | ({"all": pairs} if len(by_source) > 1 else {})
    told = make_table("source", "prompts", "A", "B", "B - A", "95 % interval", "p", "won/lost/tied")
    for name, members in groups.items():
        before, after = (np.array([pair[i].mean for pair in members]) for i in (0, 1))
        change = after - before
        low, high = bootstrap_interval(change, seed=SEED)
        p = sign_flip_test(change, seed=SEED)
        won, lost = int((change > 0).sum()), int((change < 0).sum())
        told.add_row(
            escape_control_chars(name),
            str(len(members)),
            *(f"{before.mean():.3f}", f"{after.mean():.3f}", f"{change.mean():+.3f}", f"{low:+.3f} {high:+.3f}"),
            *(f"{p:.2g}", f"{won}/{lost}/{len(members) - won - lost}"),
        )
    console.print()
    console.print(told)
    console.print()
    print_line(console, describe_result(change, p))  # of the last line, which is of all
    print_line(console, "p is of the paired sign-flip test over prompts.", "dim")
    if all(len(x.scores) == 1 and x.scores[0] in (0, 1) for pair in pairs for x in pair):
        print_line(
            console,
            f"One answer each, right or wrong: McNemar's exact test says p = {mcnemar_test(won, lost):.2g}.",
            "dim",
        )


def describe_result(change: Array, p: float) -> str:
    """The whole in a sentence."""
    if not change.any():
        return "A and B score alike on every prompt."
    if p < 0.05:
        return f"{'B' if change.sum() > 0 else 'A'} is better (p = {p:.2g})."
    return f"No difference that {len(change)} prompts can tell from chance (p = {p:.2g})."


def print_changes(pairs: list[tuple[PromptSamples, PromptSamples]], lines: int, console: Console) -> None:
    """The prompts whose mean score moved most, with a completion of each side."""
    moved = sorted(
        (pair for pair in pairs if pair[0].mean != pair[1].mean), key=lambda pair: pair[1].mean - pair[0].mean
    )
    lost, won = moved[: lines - lines // 2], moved[::-1][: lines // 2]
    for a, b in lost + [pair for pair in reversed(won) if pair not in lost]:
        console.print()
        print_line(console, f"{a.first.sample.uid}: {a.mean:.3g} of A, {b.mean:.3g} of B")
        for name, text in ("prompt", a.first.prompt.text), ("A", a.first.sample.text), ("B", b.first.sample.text):
            print_line(
                console, f"  {name:<6} {last_characters(text, console.width - 10)}", "dim" if name == "prompt" else ""
            )
