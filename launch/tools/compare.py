"""`rlsys compare`: two evaluations of the same prompts. Which is better, and do the prompts suffice to tell?"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from launch.printing import last_characters, make_table, print_line
from rlsys.errors import ConfigError
from rlsys.evaluation.significance import bootstrap_interval, mcnemar_test, sign_flip_test
from rlsys.runs.samples import SavedSample, read_saved_samples
from rlsys.text import escape_control_chars

Array = NDArray[np.float64]
SEED = 0


@dataclass(frozen=True)
class PromptSamples:
    """The samples of one prompt on one side. At least one of them has a score."""

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


Pair = tuple[PromptSamples, PromptSamples]  # of the same prompt, on side A and on side B


@dataclass(frozen=True)
class Side:
    file: Path
    samples_by_uid: dict[str, PromptSamples]
    unjudged: int  # number of prompts without any score

    @property
    def description(self) -> str:
        samples = sum(len(p.samples) for p in self.samples_by_uid.values())
        return f"{self.file}: {len(self.samples_by_uid)} prompts, {samples} samples"


def compare(a: str, b: str, step: int | None, lines: int, console: Console) -> None:
    """Prints the comparison. `step` chooses an evaluation of a run, and `lines` limits the prompts that are shown."""
    sides = read_side(find_samples(a, step)), read_side(find_samples(b, step))
    pairs, how = match_prompts(*sides)
    for name, side in zip("AB", sides, strict=True):
        print_line(console, f"{name}  {side.description}")
        if side.unjudged:
            print_line(console, f"   prompts of {name} without a verdict, left out: {side.unjudged}", "yellow")
    console.print()
    print_line(console, f"prompts in both: {len(pairs)}, {how}")
    for i, (name, side) in enumerate(zip("AB", sides, strict=True)):
        paired = {saved.sample.uid for pair in pairs for saved in pair[i].samples}  # several uids may share a text
        if left := len(side.samples_by_uid) - len(paired):
            total = len(side.samples_by_uid)
            print_line(console, f"prompts in {name} only, which are not compared: {left} of {total}", "yellow")
    print_figures(pairs, console)
    if lines:
        print_changes(pairs, lines, console)


def find_samples(target: str, step: int | None) -> Path:
    """The file of samples: that of a run's evaluation, or the target itself."""
    path = Path(target).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"{target} does not exist. Give a run, or a .parquet file of samples.")
    files = sorted((path / "samples").glob("eval-*.parquet"))
    if not files:
        raise ConfigError(f"{target} holds no evaluation: no samples/eval-*.parquet. Were there eval.datasets?")
    if step is None:
        return files[-1]
    if (chosen := path / "samples" / f"eval-{step:06d}.parquet") not in files:
        steps = ", ".join(str(int(p.stem.partition("-")[2])) for p in files)
        raise ConfigError(f"{target} was not evaluated at step {step}, but at {steps}.")
    return chosen


def read_side(file: Path) -> Side:
    by_uid: dict[str, list[SavedSample]] = defaultdict(list)
    for saved in read_saved_samples(file):
        by_uid[saved.sample.uid].append(saved)
    prompts = {uid: PromptSamples(samples) for uid, samples in by_uid.items()}
    judged = {uid: p for uid, p in prompts.items() if p.scores}
    if not judged:
        raise ConfigError(f"{file} holds no sample with a score.")
    return Side(file, judged, len(prompts) - len(judged))


def match_prompts(a: Side, b: Side) -> tuple[list[Pair], str]:
    """Pairs samples of the same prompt, and says how: by uid where it names the same prompt, by text otherwise."""
    shared = [uid for uid in a.samples_by_uid if uid in b.samples_by_uid]
    candidates = {uid: (a.samples_by_uid[uid], b.samples_by_uid[uid]) for uid in shared}
    by_uid = {uid: pair for uid, pair in candidates.items() if same_prompt(*pair)}
    rest = [[p for uid, p in side.samples_by_uid.items() if uid not in by_uid] for side in (a, b)]
    # Two models render one chat as two texts. So chats are compared as messages where every prompt has them.
    as_chat = all(p.first.prompt.messages for side in rest for p in side)
    texts_a, texts_b = (group_by_text(side, as_chat) for side in rest)
    by_text = [(texts_a[text], texts_b[text]) for text in texts_a if text in texts_b]
    counts = {"uid": len(by_uid), "the text of the prompt": len(by_text)}
    ways = [way for way, count in counts.items() if count]
    if len(ways) == 1:
        return [*by_uid.values(), *by_text], f"matched by {ways[0]}"
    if ways:
        return [*by_uid.values(), *by_text], ", ".join(f"{n} matched by {way}" for way, n in counts.items())
    raise ConfigError(explain_no_match(a, b, shared))


def explain_no_match(a: Side, b: Side, shared: list[str]) -> str:
    """Names a prompt of each side, if possible two with the same uid."""
    uid = next(iter(shared or a.samples_by_uid))
    first, other = (
        a.samples_by_uid[uid].first,
        (b.samples_by_uid.get(uid) or next(iter(b.samples_by_uid.values()))).first,
    )
    return (
        f"{a.file} and {b.file} share no prompt"
        + (f", though {len(shared)} uids: {uid} is " if shared else f": {uid} of the first is ")
        + f"{first.prompt.text[-60:]!r}, {other.sample.uid} of the other is {other.prompt.text[-60:]!r}. "
        "Evaluate both on the same data."
    )


def same_prompt(a: PromptSamples, b: PromptSamples) -> bool:
    """True if both have the same text or the same chat. Two models may render one chat as two texts."""
    one, other = a.first.prompt, b.first.prompt
    return one.text == other.text or (one.messages is not None and one.messages == other.messages)


def group_by_text(prompts: list[PromptSamples], as_chat: bool) -> dict[str, PromptSamples]:
    groups: dict[str, list[SavedSample]] = defaultdict(list)
    for samples in prompts:
        prompt = samples.first.prompt
        groups[json.dumps(prompt.messages) if as_chat else prompt.text] += samples.samples
    return {text: PromptSamples(samples) for text, samples in groups.items()}


def print_figures(pairs: list[Pair], console: Console) -> None:
    """Prints both means of each source, their difference and its interval; and of all sources if there are several."""
    by_source: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_source[pair[0].first.prompt.source].append(pair)
    groups = dict(sorted(by_source.items())) | ({"all": pairs} if len(by_source) > 1 else {})
    table = make_table("source", "prompts", "A", "B", "B - A", "95 % interval", "p", "won/lost/tied")
    for name, members in groups.items():
        before, after = (np.array([pair[i].mean for pair in members]) for i in (0, 1))
        change = after - before
        low, high = bootstrap_interval(change, seed=SEED)
        p = sign_flip_test(change, seed=SEED)
        won, lost = int((change > 0).sum()), int((change < 0).sum())
        table.add_row(
            escape_control_chars(name),
            str(len(members)),
            *(f"{before.mean():.3f}", f"{after.mean():.3f}", f"{change.mean():+.3f}", f"{low:+.3f} {high:+.3f}"),
            *(f"{p:.2g}", f"{won}/{lost}/{len(members) - won - lost}"),
        )
    console.print()
    console.print(table)
    console.print()
    print_line(console, describe_result(change, p))  # of the last group, which is all pairs
    print_line(console, "p is of the paired sign-flip test over prompts.", "dim")
    if all(len(x.scores) == 1 and x.scores[0] in (0, 1) for pair in pairs for x in pair):
        mcnemar = f"One answer each, right or wrong: McNemar's exact test says p = {mcnemar_test(won, lost):.2g}."
        print_line(console, mcnemar, "dim")


def describe_result(change: Array, p: float) -> str:
    if not change.any():
        return "A and B score alike on every prompt."
    if p < 0.05:
        return f"{'B' if change.sum() > 0 else 'A'} is better (p = {p:.2g})."
    return f"No difference that {len(change)} prompts can tell from chance (p = {p:.2g})."


def print_changes(pairs: list[Pair], lines: int, console: Console) -> None:
    """Prints the prompts whose mean score changed most, with a completion of each side."""
    changed = [pair for pair in pairs if pair[0].mean != pair[1].mean]
    changed.sort(key=lambda pair: pair[1].mean - pair[0].mean)
    lost, won = changed[: lines - lines // 2], changed[::-1][: lines // 2]
    for a, b in lost + [pair for pair in reversed(won) if pair not in lost]:
        console.print()
        print_line(console, f"{a.first.sample.uid}: {a.mean:.3g} of A, {b.mean:.3g} of B")
        for name, text in ("prompt", a.first.prompt.text), ("A", a.first.sample.text), ("B", b.first.sample.text):
            line = f"  {name:<6} {last_characters(text, console.width - 10)}"
            print_line(console, line, "dim" if name == "prompt" else "")
