"""What one GPU does with models of a real size: the shapes of Qwen2.5 0.5B and 1.5B with random weights, engine and rank sharing it.

    .venv/bin/python tests/gpu/table.py --json tests/gpu/results/table.json
    .venv/bin/python tests/gpu/table.py --device cpu --models tiny --steps 2 --tokens 32     # the same without a GPU, to try it

Each model is saved, benchmarked by `rlsys bench`, and its figures stand in one line: seconds of a step, tokens/s, floating-point work
that was needed over what a large matrix product did in the same run, a sync over one copy of the same bytes on the device, and the
share of a step in which engines were put to sleep or woken. `trained` is the share of samples that updates computed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))
from bench_models import random_model
from host import host_figures
from records import stamp

ROOT = Path(__file__).parent.parent.parent
QWEN = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 4096}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14} | QWEN,
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12} | QWEN,
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    | QWEN
    | {"vocab_size": 512},
}
SETTINGS = [
    "rollout.engines=1",
    "rollout.dtype=bfloat16",
    "rollout.gpu_memory=0.5",
    "policy.ranks=1",
    "policy.dtype=bfloat16",
    "policy.gradient_checkpointing=true",
    "policy.tokens_per_pack=16384",
    "trainer.prompts_per_step=32",
    "trainer.samples_per_prompt=8",
    "trainer.updates_per_step=1",
    "reference.kl_coef=0",
]
HEAD = (
    "model",
    "parameters",
    "s a step",
    "trained",
    "tokens/s",
    "MFU",
    "rollout",
    "score",
    "update",
    "sync:copy",
    "sleep, wake",
)
PLACEMENT = {"gpu": "colocated", "cpu": "separate"}
LARGE = {"gpu": 8192, "cpu": 2048}  # rows and columns of the matrices
LIBRARIES = ("torch", "vllm", "deepspeed", "transformers")


def build_model(name: str) -> Any:
    """Made where the device is: on a CPU the random numbers of a real size take more than a minute."""
    import torch

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return random_model(**SHAPES[name]).bfloat16()


def word_tokenizer(vocabulary: int) -> Any:
    """One word for each token, so that any sampled token has a text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def run_bench(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of `rlsys bench`."""
    out = folder / "figures.json"
    command = [sys.executable, "-m", "launch", "bench", "configs/tiny_cpu.yaml", *SETTINGS]
    command += [f"cluster.device={options.device}", f"cluster.placement={PLACEMENT[options.device]}"]
    command += [f"model.path={folder}", f"--steps={options.steps}", "--json", str(out)]
    command += [f"--prompt-tokens={options.tokens}", f"--completion-tokens={options.tokens}", *options.settings]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(1)
    return dict(json.loads(out.read_text()))


def median_seconds(work: Callable[[], object], device: str, rounds: int = 8) -> float:
    """Median seconds of something that a device does."""
    import torch

    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        if device == "gpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[rounds // 4 :])


def measure_device(device: str, size: int) -> tuple[float, float]:
    """FLOP/s of a large product in bfloat16, and seconds to copy so many bytes once."""
    import torch

    where, n = "cuda" if device == "gpu" else "cpu", LARGE[device]
    a = torch.randn(n, n, dtype=torch.bfloat16, device=where)
    source = torch.ones(size, dtype=torch.uint8, device=where)
    target = torch.zeros_like(source)
    return 2 * n**3 / median_seconds(lambda: a @ a, device), median_seconds(lambda: target.copy_(source), device)


def measure_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    with tempfile.TemporaryDirectory() as place:
        model = build_model(name)
        model.save_pretrained(place)
        word_tokenizer(SHAPES[name]["vocab_size"]).save_pretrained(place)
        parameters = sum(p.numel() for p in model.parameters())
        del model
        torch.cuda.empty_cache()
        figures = run_bench(Path(place), options)
    peak, copy = measure_device(options.device, figures["sync"]["bytes"])  # the workers are gone by now
    step = statistics.fmean(figures["step_s"])
    needed = {phase: flops / options.steps for phase, flops in figures["needed_flops"].items()}
    use = {phase: flops / figures["at_work_s"][phase] / peak for phase, flops in figures["needed_flops"].items()}
    resting = sum(figures["work_share"]["rollout-0"].get(state, 0.0) for state in ("sleep", "wake"))
    return {
        "model": name,
        "parameters": parameters,
        "step_s": step,
        "tokens_per_s": figures["generated_tokens_per_s"],
        "mfu": sum(needed.values()) / step / peak,
        "mfu_of": use,
        "sync_over_copy": figures["sync"]["s"] / copy,
        "sleep_and_wake": resting,
        "peak_flops": peak,
        "copy_s": copy,
        "figures": figures,
    }


def trained_share(row: dict[str, Any]) -> float:
    """The share of samples that updates computed. Below 1 their seconds are not those of a whole update."""
    figures, lengths = row["figures"], row["figures"]["options"]
    sampled = figures["samples_per_s"] * (lengths["prompt_tokens"] + lengths["mean"])
    return float(figures["trained_tokens_per_s"] / sampled)


def format_row(row: dict[str, Any]) -> list[str]:
    of = [f"{row['mfu_of'].get(phase, 0):.1%}" for phase in ("rollout", "score", "update")]
    first = [row["model"], f"{row['parameters'] / 1e6:,.1f} M", f"{row['step_s']:.2f}", f"{trained_share(row):.0%}"]
    rates = [f"{row['tokens_per_s']:,.0f}", f"{row['mfu']:.1%}"]
    return [*first, *rates, *of, f"{row['sync_over_copy']:.2f}", f"{row['sleep_and_wake']:.1%}"]


def write_record(file: Path, commit: str, rows: list[dict[str, Any]], device: str, host: dict[str, float]) -> None:
    import torch

    card = torch.cuda.get_device_name() if device == "gpu" else "CPU"
    packages = packages_distributions()  # vLLM for CPUs has another name
    versions = {name: version(packages[name][0]) for name in LIBRARIES}
    record = {"commit": commit, "card": card, "versions": versions, "host_ms_a_step": host, "rows": rows}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", choices=SHAPES, nargs="+", default=["0.5b", "1.5b"])
    parser.add_argument("--device", choices=LARGE, default="gpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt, and of a completion")
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    commit = stamp() if options.json else ""  # refuses changes before the work, not after it
    host = host_figures()
    rows = [measure_model(name, options) for name in options.models]
    for row in (HEAD, *map(format_row, rows)):
        print("  ".join(f"{cell:>16}" for cell in row))
    if options.json:
        write_record(options.json, commit, rows, options.device, host)


if __name__ == "__main__":
    main()
