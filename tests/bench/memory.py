"""What `rlsys plan` says a process needs, against the peak memory of real runs: every role, several models, ZeRO 0 to 3.

    python tests/bench/memory.py                                # all cases, about fifteen minutes on two cores
    python tests/bench/memory.py --case 8m --zero 2 --json figures.json

The peak is the kernel's own (VmHWM): every page that the process has touched and that is in memory, shared ones too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from models import CASES, random_model, save_case

from rlsys.checks import load_checked
from rlsys.estimates.memory import Parts, SequenceLengths, total_bytes
from rlsys.estimates.processes import memory_by_role
from rlsys.models.lookup import model_shape

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CONFIG = ROOT / "configs" / "tiny_cpu.yaml"
COMMON = ["trainer.steps=3", "run.max_restarts=0", "eval.datasets=[]", "eval.every=0", "policy.warmup_updates=0"]
STEP = ["trainer.prompts_per_step=16", "trainer.samples_per_prompt=8", "trainer.updates_per_step=2"]
TINY_PROMPT = 7  # tokens
FEW = ["trainer.prompts_per_step=4", "trainer.samples_per_prompt=4"]
COIN = "reward.functions={coin: {function: 'launch.tools.synthetic:coin'}}"
LARGE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
LARGE |= {"num_key_value_heads": 4, "vocab_size": 32768, "max_position_embeddings": 512, "tie_word_embeddings": True}


@dataclass
class Peak:
    """Of one process, in bytes."""

    total: int = 0  # VmHWM
    parts: dict[str, int] = field(
        default_factory=dict
    )  # anonymous, file and shared pages when it was last seen near its peak


def settings(case: str, folder: Path) -> list[str]:
    """What a case changes of the demo's configuration; its model is made."""
    if case == "tiny":
        return []
    if case == "8m":
        save_case(
            replace(CASES["8m"], end=0.0), folder
        )  # completions are as long as they may be, as the plan takes them to be
        lengths = ["rollout.max_prompt_tokens=16", "rollout.max_new_tokens=128"]
    else:
        save_large(folder)
        lengths = ["rollout.max_prompt_tokens=16", "rollout.max_new_tokens=16", "trainer.steps=2", *FEW]
    return [f"model.path={folder}", f"data.train={folder / 'prompts.jsonl'}", COIN, *STEP, *lengths]


def save_large(folder: Path) -> None:
    """129 million parameters, with the tokenizer and prompts of the small ones: most of its words have no text."""
    save_case(CASES["small"], folder)
    random_model(**LARGE).save_pretrained(folder)


def measured(config: Path, overrides: list[str], folder: Path) -> dict[str, Peak]:
    """The peaks of a run's processes, by worker, the driver among them."""
    command = [sys.executable, "-m", "launch", "train", str(config), f"run.dir={folder}", *COMMON, *overrides]
    found: dict[str, Peak] = {}
    with (folder.parent / f"{folder.name}.txt").open("w") as out:
        run = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        while run.poll() is None:
            time.sleep(0.05)
            for name, pid in [("driver", driver_of(run.pid)), *workers(folder)]:
                look(found.setdefault(name, Peak()), pid)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{Path(out.name).read_text()[-3000:]}")
    return found


def driver_of(command: int) -> int:
    """The process that works, below the one that waits for it."""
    try:
        children = psutil.Process(command).children()
    except psutil.Error:
        return command
    return children[0].pid if children else command


def workers(folder: Path) -> list[tuple[str, int]]:
    found = []
    for file in (folder / "logs").glob("*.pid"):
        try:
            found.append((file.stem, int(json.loads(file.read_text())["pid"])))
        except (OSError, ValueError):  # being written
            continue
    return found


def look(peak: Peak, pid: int) -> None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return
    status = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    if "VmHWM" not in status:  # it has ended
        return
    kib = {name: int(status[name]) << 10 for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")}
    if kib["VmRSS"] >= sum(peak.parts.values()):
        peak.parts = {name: kib[name] for name in ("RssAnon", "RssFile", "RssShmem")}
    peak.total = max(peak.total, kib["VmHWM"])


def predicted(config: Path, overrides: list[str]) -> dict[str, tuple[str, Parts]]:
    """By worker: the moment when it needs most, and what for."""
    c = load_checked(config, [*COMMON, *overrides])
    model, _ = model_shape(c.model.path)
    prompt = c.rollout.max_prompt_tokens or TINY_PROMPT
    every = memory_by_role(c, model, SequenceLengths(prompt, c.rollout.max_new_tokens))
    found = {name: every[name] for name in ("driver", "reference") if name in every}
    found |= {f"rollout-{i}": every["rollout"] for i in range(c.rollout.engines)}
    found |= {f"policy-{i}": every["policy" if i else "policy-0"] for i in range(c.policy.ranks)}
    found |= {f"critic-{i}": every["critic"] for i in range(c.critic.ranks) if "critic" in every}
    found |= {f"reward-{i}": every["reward"] for i in range(c.reward.workers)}
    return {name: process.peak() for name, process in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=["tiny", "8m", "129m"], action="append")
    parser.add_argument("--zero", type=int, choices=[0, 1, 2, 3], action="append")
    parser.add_argument("--config", type=Path, default=CONFIG, help="what the cases change")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("model zero worker         measured  predicted  ratio  (MiB)   at: parts; anonymous, file and shared pages")
    for case in asked.case or ["tiny", "8m", "129m"]:
        with tempfile.TemporaryDirectory() as name:
            changed = settings(case, Path(name) / "model")
            for stage in asked.zero or range(4):
                overrides = [*changed, f"policy.zero_stage={stage}", *asked.overrides]
                expected = predicted(asked.config, overrides)
                for worker, peak in sorted(measured(asked.config, overrides, Path(name) / f"zero-{stage}").items()):
                    rows.append(compare(case, stage, worker, peak, *expected.get(worker, ("", {}))))
    worst = max(rows, key=lambda r: abs(r["ratio"] - 1))
    print(f"farthest off: {worst['worker']} of {worst['case']} with ZeRO {worst['zero']}: {worst['ratio']:.2f}")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))


def compare(case: str, stage: int, worker: str, peak: Peak, moment: str, parts: Parts) -> dict[str, Any]:
    ratio = total_bytes(parts) / peak.total
    said = ", ".join(f"{n} {v / 2**20:,.0f}" for n, v in parts.items())
    pages = " + ".join(f"{v / 2**20:,.0f}" for v in peak.parts.values())
    line = (
        f"{case:5} {stage:4} {worker:12} {peak.total / 2**20:10,.0f} {total_bytes(parts) / 2**20:10,.0f} {ratio:6.2f}"
    )
    print(f"{line}          {moment}: {said}; {pages}", flush=True)
    found = {
        "case": case,
        "zero": stage,
        "worker": worker,
        "predicted": total_bytes(parts),
        "ratio": ratio,
        "moment": moment,
    }
    return found | asdict(peak) | {"expected": parts}


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
