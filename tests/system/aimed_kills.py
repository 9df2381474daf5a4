"""Runs in each of whose phases every kind of process that works in it is killed; each must end as the one left alone.

    .venv/bin/python tests/system/aimed_kills.py SEED FILE.json       20 to 30 minutes

A kill that comes too late for its phase is tried again in a later step. Good runs that the file has of the same code are
kept (tests/launch/records.py). kills.py kills anything at any time.
"""

import contextlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))
from aiming import DRIVER, EPISODE_PROCESS, REWARD_PROCESS, aim, ends
from killing import CONFIG, EPISODES, ROOT, Run, apart
from kills import equal
from records import current, measuring

LAST = 14  # step
OPTIONS = [f"trainer.steps={LAST}", "eval.every=1", "checkpoint.every=1", "run.max_restarts=100"]
# name → configuration, and settings
KINDS: dict[str, tuple[Path, list[str]]] = {
    "GRPO": (CONFIG, ["trainer.prompts_per_step=8", "dynamic_sampling.enabled=true"]),
    "PPO": (ROOT / "configs" / "ppo.yaml", ["trainer.prompts_per_step=64", "critic.alone_steps=1", "critic.ranks=2"]),
    "episodes": (CONFIG, ["trainer.prompts_per_step=8", *EPISODES]),
}
# kind, phase → who works in it
TARGETS = {
    ("GRPO", "rollout"): ["rollout-0", DRIVER],
    ("GRPO", "reward"): ["reward-1", REWARD_PROCESS, DRIVER],
    ("GRPO", "score"): ["reference", "policy-1", DRIVER],
    ("GRPO", "update"): ["policy-0", "policy-1", DRIVER],
    ("GRPO", "sync"): ["rollout-1", "policy-0", DRIVER],
    ("GRPO", "evaluation"): ["rollout-0", "reward-0", DRIVER],
    ("GRPO", "checkpoint"): ["policy-1", DRIVER],
    ("GRPO", "writing of the checkpoint"): ["policy-0", DRIVER],
    ("PPO", "update"): ["critic-1"],
    ("PPO", "checkpoint"): ["critic-0"],
    ("episodes", "rollout"): ["episode-1", EPISODE_PROCESS, "rollout-0", DRIVER],
    ("episodes", "evaluation"): ["episode-0", EPISODE_PROCESS, DRIVER],
}
TRIES = 3
LIMIT_S = 900
RECORD = "aimed_kills.json"


def main(seed: int, target: Path, folder: Path) -> bool:
    """Returns whether all is good."""
    earlier = json.loads(target.read_text()) if target.exists() else []
    results = {(r["kind"], r["phase"]): r for r in earlier}
    kept = {(r["kind"], r["phase"]) for r in current(earlier, RECORD) if is_good(r)}
    rng = random.Random(seed)
    for kind, phase in [key for key in TARGETS if key not in kept]:
        results[kind, phase] = aimed(kind, phase, folder, rng)
        print(json.dumps(results[kind, phase]), flush=True)
        target.write_text(json.dumps([results[key] for key in TARGETS if key in results], indent=2) + "\n")
    return all(map(is_good, results.values()))


def is_good(result: dict[str, Any]) -> bool:
    return result["equal"] == "yes" and not (result["missed"] or result["gave_up"] or result["left"])


def aimed(kind: str, phase: str, folder: Path, rng: random.Random) -> dict[str, Any]:
    path = folder / f"{kind}, {phase}"
    with measuring(RECORD) as commit:
        alone = folder / f"{kind}-{commit[-7:]}"  # of the same code
        if not alone.exists():
            undisturbed = started(kind, alone)
            assert undisturbed.wait(LIMIT_S) == 0, undisturbed.text()
        with apart() as place:
            run = started(kind, path, place.environment)
            result = disturbed(run, phase, TARGETS[kind, phase], rng) | {"left": place.left()}
    return {"kind": kind, "phase": phase, "commit": commit} | result | {"equal": equal(alone, path)}


def started(kind: str, path: Path, environment: dict[str, str] | None = None) -> Run:
    config, settings = KINDS[kind]
    return Run(path, *OPTIONS, *settings, config=config, environment=environment).start()


def disturbed(run: Run, phase: str, victims: list[str], rng: random.Random) -> dict[str, Any]:
    """Lets a run reach its end, with the kills on the way. A victim that was not killed in the phase is `missed`."""
    began = time.monotonic()
    killed: list[str] = []
    missed: list[str] = []
    try:
        for victim in victims:
            hit = False
            with contextlib.suppress(AssertionError):  # the run has ended
                for _ in range(TRIES):
                    hit = aim(run, phase, victim, share=0.4 * rng.random())
                    wait_for_a_step(run)  # it has recovered
                    if hit:
                        break
            (killed if hit else missed).append(victim)
        gave_up = run.text()[-3000:] if run.process.wait(LIMIT_S) else ""
    finally:
        run.end()
    seconds = round(time.monotonic() - began)
    return {"killed": killed, "missed": missed, "seconds": seconds, "gave_up": gave_up}


def wait_for_a_step(run: Run) -> None:
    done = len(ends(run, "step"))
    run.until(lambda: len(ends(run, "step")) > done)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        sys.exit(not main(int(sys.argv[1]), Path(sys.argv[2]), Path(place)))
