"""What it costs that an engine proves its weights: sync with and without, of one policy rank and one engine in turn.

python tests/bench/sync_proof.py                 # Qwen2.5-0.5B's shape in float32, random weights; about 10 GB of memory
python tests/bench/sync_proof.py --layers 2 --rounds 3
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from launch.local_ray import ray_session
from rlsys.config_load import load
from workers.engines import CPU_ENVIRONMENT
from workers.policy import PolicyRank
from workers.proof import differences
from workers.rollout import RolloutWorker

CONFIG = Path(__file__).parent.parent.parent / "configs" / "tiny_cpu.yaml"


def save_model(folder: Path, layers: int) -> int:
    """Returns how many parameters it has."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlsys.tiny import make_tokenizer

    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=6)
    asked = parser.parse_args()
    config = load(CONFIG, ["policy.ranks=1", "policy.zero_stage=0", "rollout.engines=1"])
    with tempfile.TemporaryDirectory() as name, ray_session(config, Path(name)) as ray:
        model = Path(name) / "model"
        print(f"{save_model(model, asked.layers) / 1e6:.0f} M parameters", flush=True)

        def spawn(kind: type, environment: dict[str, str]) -> Any:
            options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
            return ray.remote(kind).options(**options).remote(config, 0, name)

        policy, engine = spawn(PolicyRank, {"OMP_NUM_THREADS": "1"}), spawn(RolloutWorker, CPU_ENVIRONMENT)
        address, port = ray.get(policy.where.remote())
        starts = [
            policy.start.remote(address, port, str(model), "shared_memory"),
            engine.start.remote(str(model), "shared_memory", 7),
        ]
        ray.get(starts)
        ray.get(engine.connect.remote(ray.get(policy.invite.remote())))

        def verifying(worker: Any, sync: Any) -> None:
            worker.config = dataclasses.replace(worker.config, sync=sync)

        seconds: dict[bool, list[float]] = {True: [], False: []}
        for i in range(2 * asked.rounds + 2):
            verify = i % 2 == 0
            sync = dataclasses.replace(config.sync, verify=verify)
            ray.get([worker.__ray_call__.remote(verifying, sync) for worker in (policy, engine)])
            began = time.perf_counter()
            message, prints = ray.get(policy.send.remote())
            sent = time.perf_counter()
            _, answer = ray.get(engine.take.remote([message], i))
            ended = time.perf_counter()
            assert not differences(prints, answer), differences(prints, answer)
            print(
                f"verify {verify!s:5} send {sent - began:.2f} s, take {ended - sent:.2f} s, {len(answer)} proved",
                flush=True,
            )
            if i >= 2:  # the first pair touches its memory for the first time
                seconds[verify].append(ended - began)
        on, off = statistics.median(seconds[True]), statistics.median(seconds[False])
        best = min(seconds[True]) / min(seconds[False])
        print(
            f"median {on:.2f} s with proof, {off:.2f} s without: ratio {on / off:.3f}; ratio of the fastest {best:.3f}"
        )


if __name__ == "__main__":
    main()
