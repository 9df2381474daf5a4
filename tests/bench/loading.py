"""Measures the host memory of ranks while they load a model under ZeRO 3: random weights of Llama's shape.

    python tests/bench/loading.py                      # 1 GiB in float32, 2 ranks, a minute and 7 GB of memory
    python tests/bench/loading.py --layers 4 --hidden 512

Peaks are the kernel's (VmHWM), beyond what a rank has before it loads: `load` until the model is there, and `start` until
its optimizer is there and has proved its log-probs. A bound follows each: 1.3 × (own share + largest tensor).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from workers.learner.files.host_memory import giving_back_large_blocks

ROOT = Path(__file__).parent.parent.parent
VOCABULARY = 65536
STATE = 4 + 8  # bytes: a parameter's weight in float32, and its two moments
GRADIENT = 4


def save_model(folder: Path, layers: int, hidden: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlsys.tasks.zigzag import make_tokenizer

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
    }
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    config = AutoConfig.for_model("llama", **sizes, **heads, tie_word_embeddings=True)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lm.save_pretrained(folder, max_shard_size="200MB")
    make_tokenizer().save_pretrained(folder)


def status(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0]) << 10


@giving_back_large_blocks()
def measure(folder: str, rank: int, ranks: int, port: int, dtype: str, optimizer: bool) -> dict[str, int]:
    """Loads the model in this process, as a rank of the policy."""
    from rlsys.config.loading import load_config
    from workers.learner.files.loading import load_policy
    from workers.learner.proofs.at_start import prove_loaded, prove_logprobs
    from workers.learner.rendezvous import join_process_group
    from workers.learner.zero import ZeroEngine, import_deepspeed

    settings = [f"policy.ranks={ranks}", "policy.zero_stage=3", f"policy.dtype={dtype}", f"rollout.dtype={dtype}"]
    config = load_config(ROOT / "configs" / "tiny_cpu.yaml", settings)
    import_deepspeed(config, ranks)
    join_process_group("cpu", rank, ranks, "127.0.0.1", port, seed=0, timeout_s=600)
    before = status("VmRSS")
    packed = load_policy(config, folder)
    prove_loaded(packed, config)
    load = status("VmHWM") - before
    sizes = [p.ds_numel for p in packed.parameters()]
    width = 4 if dtype == "float32" else 2
    share, largest = sum(sizes) / ranks, width * max(sizes)
    peaks = {"model": sum(sizes) * width, "load": load, "load_bound": int(1.3 * (share * width + largest))}
    if optimizer:
        zero = ZeroEngine(packed, config.policy, 1e-6)
        prove_logprobs(packed.lm, zero.forward_all)
        held = share * (width + STATE + GRADIENT)
        peaks |= {"start": status("VmHWM") - before, "start_bound": int(1.3 * (held + largest))}
    return peaks


def load_in_ranks(folder: str, ranks: int = 2, dtype: str = "float32", optimizer: bool = False) -> list[dict[str, int]]:
    """Loads the model in processes that meet as ranks. Returns what each measured."""
    from workers.start.ports import free_port

    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(ranks):
        arguments = (folder, rank, ranks, port, dtype, optimizer)
        call = f"import json, loading; print(json.dumps(loading.measure(*{arguments!r})))"
        command = [sys.executable, "-c", call]
        processes.append(
            subprocess.Popen(command, cwd=Path(__file__).parent, env=environment, stdout=subprocess.PIPE, text=True)
        )
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.layers, arguments.hidden)
        for dtype in ("bfloat16", "float32"):
            for rank, sizes in enumerate(load_in_ranks(folder, arguments.ranks, dtype, optimizer=True)):
                print(dtype, f"rank {rank}:", ", ".join(f"{name} {size >> 20:,} MiB" for name, size in sizes.items()))


if __name__ == "__main__":
    main()
