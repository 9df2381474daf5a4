"""Everything that a new GPU should show, the most valuable first, within 25 minutes.

    make gpu
    .venv/bin/python tests/gpu/first_hour.py --minutes 10 --only sync learning

Each part runs by itself with a limit of time; the limits add up to more than the whole. A failed part does not stop the next. Logs and figures go to a folder that is
named after the card, and `summary.json` in it says card, driver, versions, commit, and how each part ended.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
from records import stamp

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Part:
    shows: str
    command: list[str]  # after python
    minutes: float


@dataclass(frozen=True)
class Outcome:
    name: str
    shows: str
    result: str  # passed, skipped, failed: exit code 1, no time left, …
    seconds: float


def tests(*words: str) -> list[str]:
    return ["-m", "pytest", "-o", "addopts=", "-q", "-rs", *words]


def parts(folder: Path) -> dict[str, Part]:
    runs = str(HERE / "test_runs.py")
    return {
        "kernels": Part("values and gradients of attention", tests(str(HERE / "test_attention.py")), 4),
        "sync": Part("engine and policy agree after each sync, by every transport", tests(runs, "-k", "one_gpu"), 7),
        "learning": Part("bfloat16 with ZeRO 2 and 3 learns", tests(runs, "-k", "learns"), 6),
        "sleep": Part("weights survive sleeping and waking", tests(runs, "-k", "survive"), 3),
        "kill": Part("a killed engine is replaced", tests(runs, "-k", "killed"), 4),
        "nccl": Part("several GPUs: NCCL, generation beside training", tests(runs, "-k", "two_"), 6),
        "fingerprints": Part("a GPU's fingerprints are a CPU's", tests(str(HERE / "test_fingerprint.py")), 2),
        "attention": Part(
            "TFLOP/s at 4k, 16k and 32k tokens",
            [str(HERE / "attention.py"), "--rounds", "6", "--json", str(folder / "attention.json")],
            4,
        ),
        "table": Part(
            "seconds of each phase at 0.5B, to hold beside roofline.py",
            [str(HERE / "table.py"), "--models", "0.5b", "--steps", "3", "--json", str(folder / "table.json")],
            6,
        ),
        "decoding": Part("tokens/s of one engine", [str(HERE / "decoding.py")], 3),
    }


def run_part(name: str, part: Part, folder: Path, left_s: float) -> Outcome:
    """Runs a part to its end, or to that of its time."""
    log, began, limit = folder / f"{name}.log", time.monotonic(), min(part.minutes * 60, left_s)
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *part.command], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            result = describe_exit(process.wait(limit), log.read_text())
        except subprocess.TimeoutExpired:
            end(process)
            result = f"ended after {limit:.0f} s"
    return Outcome(name, part.shows, result, round(time.monotonic() - began, 1))


def describe_exit(code: int, text: str) -> str:
    skipped = re.search(r"^SKIPPED .*?: (.*)$", text, re.MULTILINE)
    if code == 0 and skipped and " passed" not in text:
        return f"skipped: {skipped[1]}"
    return "failed: exit code " + str(code) if code else "passed"


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a part and all that it started. A run first gets time to end its workers."""
    for number, patience_s in ((signal.SIGINT, 30), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


def describe_machine() -> dict[str, str]:
    import torch
    import transformers
    import vllm

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    gpus = str(torch.cuda.device_count())
    versions = {"torch": torch.__version__, "vllm": vllm.__version__, "transformers": transformers.__version__}
    return {"card": card, "gpus": gpus, "driver": driver(), "commit": stamp()} | versions


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--only", nargs="+", choices=parts(HERE), help="these parts")
    parser.add_argument("--out", type=Path, help="where logs and figures go; default: tests/gpu/results/<card>")
    options = parser.parse_args()
    machine = describe_machine()
    card = re.sub(r"\W+", "_", machine["card"]).strip("_").lower()
    folder = (options.out or HERE / "results" / card).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    deadline, outcomes = time.monotonic() + options.minutes * 60, []
    for name, part in parts(folder).items():
        if options.only and name not in options.only:
            continue
        left = deadline - time.monotonic()
        outcome = run_part(name, part, folder, left) if left > 30 else Outcome(name, part.shows, "no time left", 0)
        outcomes.append(outcome)
        print(f"{name:14} {outcome.seconds:6.1f} s  {outcome.result:24} {part.shows}", flush=True)
        summary = {"machine": machine, "parts": [asdict(o) for o in outcomes]}
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"logs and figures: {folder}")
    sys.exit(any(o.result.startswith(("failed", "ended")) for o in outcomes))


if __name__ == "__main__":
    main()
