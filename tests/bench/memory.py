"""Compares the memory that `rlsys plan` estimates with the peaks of real runs: all roles, several models, ZeRO 0 to 3.

    python tests/bench/memory.py                                # all cases, about fifteen minutes on two cores
    python tests/bench/memory.py --case 8m --zero 2 --json figures.json

The peak is the kernel's (VmHWM): all pages of the process that were in memory at a time, shared pages included.
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
from bench_models import CASES, random_model, save_case

from launch.tools.estimates.memory import Parts, ProcessMemory, SequenceLengths, total_bytes
from launch.tools.estimates.processes import memory_by_role
from rlsys.checks import load_checked
from rlsys.models.lookup import model_shape

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CONFIG = ROOT / "configs" / "tiny_cpu.yaml"
COMMON = ["trainer.steps=3", "run.max_restarts=0", "eval.datasets=[]", "eval.every=0", "policy.warmup_updates=0"]
STEP = ["trainer.prompts_per_step=16", "trainer.samples_per_prompt=8", "trainer.updates_per_step=2"]
TINY_PROMPT = 7  # tokens
FEW = ["trainer.prompts_per_step=4", "trainer.samples_per_prompt=4"]
RANDOM = "reward.functions={random: {function: 'launch.tools.synthetic:random_reward'}}"
LARGE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
LARGE |= {"num_key_value_heads": 4, "vocab_size": 32768, "max_position_embeddings": 512, "tie_word_embeddings": True}


@dataclass
class Peak:
    """The peak memory of a process, in bytes."""

    total: int = 0  # VmHWM
    parts: dict[str, int] = field(
        default_factory=dict
    )  # anonymous, file and shared pages when it was last seen near its peak


def settings(case: str, folder: Path) -> list[str]:
    """Builds the model of a case, and returns what the case changes in the demo's configuration."""
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
    return [f"model.path={folder}", f"data.train={folder / 'prompts.jsonl'}", RANDOM, *STEP, *lengths]


def save_large(folder: Path) -> None:
    """Saves a model of 129 million parameters with the small case's tokenizer: most of its tokens have no text."""
    save_case(CASES["small"], folder)
    random_model(**LARGE).save_pretrained(folder)


def measure_peaks(config: Path, overrides: list[str], folder: Path) -> dict[str, Peak]:
    """Runs a training, and returns the peaks of its workers and of the driver, by name."""
    command = [sys.executable, "-m", "launch", "train", str(config), f"run.dir={folder}", *COMMON, *overrides]
    peaks: dict[str, Peak] = {}
    with (folder.parent / f"{folder.name}.txt").open("w") as out:
        run = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        while run.poll() is None:
            time.sleep(0.05)
            for name, pid in [("driver", driver_pid(run.pid)), *workers(folder)]:
                update_peak(peaks.setdefault(name, Peak()), pid)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{Path(out.name).read_text()[-3000:]}")
    return peaks


def driver_pid(command: int) -> int:
    """The training process, which is a child of the command."""
    try:
        children = psutil.Process(command).children()
    except psutil.Error:
        return command
    return children[0].pid if children else command


def workers(folder: Path) -> list[tuple[str, int]]:
    pids = []
    for file in (folder / "logs").glob("*.pid"):
        try:
            pids.append((file.stem, int(json.loads(file.read_text())["pid"])))
        except (OSError, ValueError):  # being written
            continue
    return pids


def update_peak(peak: Peak, pid: int) -> None:
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


def predict(config: Path, overrides: list[str]) -> dict[str, tuple[str, Parts]]:
    """The moment with the largest need and its parts, by worker."""
    c = load_checked(config, [*COMMON, *overrides])
    model, _ = model_shape(c.model.path)
    prompt = c.rollout.max_prompt_tokens or TINY_PROMPT
    by_role = memory_by_role(c, model, SequenceLengths(prompt, c.rollout.max_new_tokens))
    processes: dict[str, ProcessMemory] = {name: by_role[name] for name in ("driver", "reference") if name in by_role}
    processes |= {f"rollout-{i}": by_role["rollout"] for i in range(c.rollout.engines)}
    processes |= {f"policy-{i}": by_role["policy" if i else "policy-0"] for i in range(c.policy.ranks)}
    processes |= {f"critic-{i}": by_role["critic"] for i in range(c.critic.ranks) if "critic" in by_role}
    processes |= {f"reward-{i}": by_role["reward"] for i in range(c.reward.workers)}
    return {name: process.peak() for name, process in processes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=["tiny", "8m", "129m"], action="append")
    parser.add_argument("--zero", type=int, choices=[0, 1, 2, 3], action="append")
    parser.add_argument("--config", type=Path, default=CONFIG, help="what the cases change")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("model zero worker         measured  predicted  ratio  (MiB)   at: parts; anonymous, file and shared pages")
    for case in args.case or ["tiny", "8m", "129m"]:
        with tempfile.TemporaryDirectory() as name:
            changed = settings(case, Path(name) / "model")
            for stage in args.zero or range(4):
                overrides = [*changed, f"policy.zero_stage={stage}", *args.overrides]
                expected = predict(args.config, overrides)
                for worker, peak in sorted(measure_peaks(args.config, overrides, Path(name) / f"zero-{stage}").items()):
                    rows.append(compare(case, stage, worker, peak, *expected.get(worker, ("", {}))))
    worst = max(rows, key=lambda r: abs(r["ratio"] - 1))
    print(f"farthest off: {worst['worker']} of {worst['case']} with ZeRO {worst['zero']}: {worst['ratio']:.2f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def compare(case: str, stage: int, worker: str, peak: Peak, moment: str, parts: Parts) -> dict[str, Any]:
    ratio = total_bytes(parts) / peak.total
    parts_text = ", ".join(f"{n} {v / 2**20:,.0f}" for n, v in parts.items())
    pages = " + ".join(f"{v / 2**20:,.0f}" for v in peak.parts.values())
    line = (
        f"{case:5} {stage:4} {worker:12} {peak.total / 2**20:10,.0f} {total_bytes(parts) / 2**20:10,.0f} {ratio:6.2f}"
    )
    print(f"{line}          {moment}: {parts_text}; {pages}", flush=True)
    row = {
        "case": case,
        "zero": stage,
        "worker": worker,
        "predicted": total_bytes(parts),
        "ratio": ratio,
        "moment": moment,
    }
    return row | asdict(peak) | {"expected": parts}


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
