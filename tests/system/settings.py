"""Settings chosen at random: what `rlsys validate` accepts must run, survive a kill, and not depend on how the work is cut.

    .venv/bin/python tests/system/settings.py RUNS SEED FILE.jsonl      keeps good runs that the file has of the same code

Each choice is planned, made and reported on, and made again with a process killed on the way. Unless timing has a say in what is
sampled, all must be equal; and with other engines, ranks, packs and the like the figures of the first step must be the same but for
rounding.
"""

import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))
from click.testing import CliRunner
from killing import CONFIG, GAME, PASSING, Run, apart
from kills import equal, kill, now, pause
from records import current, measuring

from launch.tools.cli import commands
from rlsys.checks import load_checked
from rlsys.config.methods import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, LOSSES, NORMALIZERS
from rlsys.errors import ConfigError

YES_NO = (False, True)
DTYPES = ("float32", "bfloat16")
VALUES: dict[str, tuple[Any, ...]] = {
    "run.seed": (1, 7),
    "trainer.prompts_per_step": (1, 5, 8),
    "trainer.samples_per_prompt": (2, 3, 8),
    "trainer.updates_per_step": (2, 3),
    "trainer.epochs_per_step": (2,),
    "rollout.dtype": DTYPES,
    "rollout.temperature": (0.7, 1.5),
    "rollout.max_prompt_tokens": (0, 20),
    "rollout.max_new_tokens": (6, 24),
    "rollout.min_new_tokens": (3,),
    "rollout.stop": ('["7"]', '["45", "6"]'),
    "rollout.oversample": (0.25, 0.5),
    "rollout.threads": (2,),
    "rollout.enforce_eager": YES_NO,
    "rollout.exact": YES_NO,
    "policy.dtype": DTYPES,
    "policy.grad_dtype": ("bfloat16",),
    "policy.head_dtype": ("float32",),
    "policy.lora": ("{rank: 2, alpha: 4}", "{rank: 4, alpha: 4, targets: [q_proj, down_proj]}"),
    "policy.lr_schedule": ("constant", "linear", "cosine"),
    "policy.warmup_updates": (0, 2),
    "policy.weight_decay": (0.1,),
    "policy.clip_grad": (0.0, 0.01),
    "policy.threads": (2,),
    "reference.kl_coef": (0.0, 1e-3, 0.1),
    "reference.kl_in": ("loss", "reward"),
    "reference.kl_target": (0.01,),
    "reference.path": ("builtin:tiny",),
    "reference.refresh_every": (1, 2),
    "critic.alone_steps": (1,),
    "critic.clip": (0.0,),
    "critic.lam": (0.95,),
    "reward.on_failure": ("drop", "abort", "score: 0"),
    "reward.per_token": YES_NO,
    "algorithm.advantage": (*ADVANTAGES, "gae"),  # twice, as it has most to go wrong
    "algorithm.std": ("sample", "population", "none"),
    "algorithm.whiten": YES_NO,
    "algorithm.whiten_over": ("tokens", "samples"),
    "algorithm.loss": tuple(LOSSES),
    "algorithm.clip_high": (0.28,),
    "algorithm.dual_clip": (3.0,),
    "algorithm.max_ratio": (5.0,),
    "algorithm.control_tokens": ('{"3": 1, "5": 0.5}',),
    "algorithm.normalize": NORMALIZERS,
    "algorithm.kl": KL_ESTIMATORS,
    "algorithm.anchor": ("old", "rollout"),
    "correction.method": ("none", *CORRECTIONS),
    "entropy.coef": (0.01,),
    "entropy.control": ("clip_cov", "kl_cov"),
    "overlong.mask": YES_NO,
    "overlong.buffer": (3,),
    "dynamic_sampling.enabled": YES_NO,
    "sync.verify": YES_NO,
    "pipeline.max_lag": (1, 2, 3),
    "pipeline.in_flight": YES_NO,
    "eval.every": (0, 1, 3),
    "eval.samples": (2,),
    "eval.temperature": (0.7,),
    "eval.top_p": (0.9,),
    "checkpoint.every": (0, 1, 2),
    "checkpoint.keep_last": (0, 1),
    "checkpoint.keep_best": ("eval/all/accuracy", "-length/mean"),
    "tracking.samples": (0,),
    "episode.play": (f"{GAME}:play",),
    "episode.max_turns": (1, 2),
    "episode.max_tokens": (5, 20),
    "episode.window": (30, 64),
    "algorithm.credit": ("turn",),
}
CUT: dict[str, tuple[Any, ...]] = {  # says how the work is cut, and nothing of what comes out
    "rollout.engines": (1, 2, 3),
    "rollout.tensor_parallel": (1, 1, 2),  # takes long to start
    "rollout.max_sequences": (3, 16, 256),
    "rollout.kv_cache_mb": (4, 64),
    "policy.ranks": (1, 2, 3),
    "policy.sequence_parallel": (1, 2),
    "policy.zero_stage": (0, 1, 2, 3),
    "policy.offload": ("[]", "[optimizer]", "[optimizer, params]"),
    "policy.tokens_per_pack": (64, 100, 512, 4096),
    "policy.gradient_checkpointing": YES_NO,
    "policy.compile": YES_NO,
    "critic.ranks": (1, 2),
    "reward.workers": (1, 2, 3),
    "episode.workers": (1, 3),
    "episode.concurrency": (2, 256),
    "sync.transport": ("shared_memory", "object_store"),
}
NEEDS: dict[str, tuple[str, tuple[Any, ...]]] = {  # options that only go with few values of another one
    "algorithm.whiten_over": ("algorithm.advantage", ("reinforce_pp", "reinforce_pp_baseline")),
    "algorithm.max_ratio": ("algorithm.loss", ("dcpo", "dppo_tv")),
    "algorithm.control_tokens": ("episode.play", ("",)),  # the game has scores above 1
    "policy.grad_dtype": ("policy.dtype", ("bfloat16",)),
    "eval.top_p": ("eval.temperature", (0.7,)),
}
SMALL = ["trainer.steps=4", "trainer.prompts_per_step=4", "trainer.samples_per_prompt=4", "policy.lr=4e-4"]
LIMIT_S = 600
RECORD = "settings.jsonl"
ROUNDING = 2e-3  # of a figure of the first update
NOISE = 1e-5  # log-probs of float32 differ by some 1e-6


@dataclass
class Found:
    seed: int
    settings: list[str]
    words: list[str] = field(default_factory=list)  # what was wrong
    seconds: int = 0
    killed: list[Any] = field(default_factory=list)

    def need(self, good: bool, sentence: str) -> None:
        if not good:
            self.words.append(sentence)


def chosen(rng: random.Random, values: dict[str, tuple[Any, ...]], share: float) -> dict[str, Any]:
    settings = {key: rng.choice(several) for key, several in values.items() if rng.random() < share}
    return settings | {other: rng.choice(several) for key, (other, several) in NEEDS.items() if key in settings}


def words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in settings.items()]


def accepted(rng: random.Random, settings: dict[str, Any], kept: list[str]) -> list[str]:
    """With some of the settings that do not go with others left out, until `validate` finds nothing."""
    while True:
        try:
            load_checked(CONFIG, [*kept, *words(settings)])
            return [*kept, *words(settings)]
        except ConfigError as error:
            named = [key for key in settings if key in str(error)]
            if not named:
                raise AssertionError(
                    f"{words(settings)} were refused in words that name none of them: {error}"
                ) from error
            del settings[rng.choice(named)]


def some(rng: random.Random) -> list[str]:
    return accepted(rng, chosen(rng, VALUES | CUT, rng.choice((0.15, 0.25, 0.4))), SMALL)


def tried(seed: int, folder: Path) -> Found:
    rng = random.Random(seed)
    settings = some(rng)
    result = Found(seed, settings)
    began = time.monotonic()
    undisturbed = made(result, folder / f"{seed}-alone", settings)
    result.seconds = round(time.monotonic() - began)
    answered(result, "plan", str(CONFIG), *settings)
    if result.words:
        return result
    answered(result, "report", str(undisturbed.path))
    killed = made(result, folder / f"{seed}-killed", settings, rng)
    config = load_checked(CONFIG, settings)
    if config.pipeline.in_flight or config.rollout.oversample:
        return result
    result.need((same := equal(undisturbed.path, killed.path)) == "yes", f"killed: {same}")
    if config.rollout.dtype == config.policy.dtype == "float32":
        others = accepted(rng, chosen(rng, CUT, 1.0), [s for s in settings if s.split("=")[0] not in CUT])
        cut = made(result, folder / f"{seed}-cut", others)
        result.need(not (differing := differences(undisturbed, cut)), f"{others}: {differing}")
    return result


def made(result: Found, path: Path, settings: list[str], killer: random.Random | None = None) -> Run:
    """A run to its end, a process of which is killed if there is a killer; only the command's own end needs help."""
    with apart() as place:
        run = Run(path, *settings, environment=place.environment).start()
        if killer:
            step = killer.randint(-1, 3)
            while run.process.poll() is None and now(run) < step:
                time.sleep(0.05)
            pause(run, killer.uniform(0, 2))
            if run.process.poll() is None:
                result.killed = list(kill(run, killer))
                if result.killed[1] in ("everything", "the command"):
                    run.process.wait(60)
                    run.start()
        try:
            result.need(run.process.wait(LIMIT_S) == 0, run.text()[-3000:])
        finally:
            run.end()
        result.need(not (left := place.left()), f"left: {left}")
    return run


def answered(outcome: Found, *command: str) -> None:
    result = CliRunner().invoke(commands, command)
    outcome.need(result.exit_code == 0, f"{command[0]}: {result.output[-1000:]} {result.exception!r}")


def differences(one: Run, other: Run) -> dict[str, Any]:
    """Figures of the first update that differ by more than rounding."""
    lines = [next((line for line in run.lines() if line["step"] == 1), {}) for run in (one, other)]
    pairs = {
        key: [line.get(key) for line in lines] for key in lines[0].keys() | lines[1].keys() if not PASSING.match(key)
    }
    return {key: pair for key, pair in pairs.items() if not alike(*pair)}


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= NOISE + ROUNDING * max(abs(one), abs(other))
    return bool(one == other)


if __name__ == "__main__":
    runs, first, target = (int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    before = [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []
    results = {one["seed"]: one for one in before}
    kept = {one["seed"] for one in current(before, RECORD) if not one["words"]}
    with tempfile.TemporaryDirectory() as folder:
        for seed in sorted({*range(first, first + runs)} - kept):
            with measuring(RECORD) as commit:
                results[seed] = {"commit": commit, **vars(tried(seed, Path(folder)))}
            print(json.dumps(results[seed]), flush=True)
            target.write_text("".join(json.dumps(results[seed]) + "\n" for seed in sorted(results)))
    sys.exit(any(one["words"] for one in results.values()))
