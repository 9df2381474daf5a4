"""What a sync costs, over what copying the same bytes once costs: of policy ranks and one engine, with and without proof.

python tests/bench/sync.py                       # Qwen2.5-0.5B's shape in float32, random weights; about 10 GB of memory
python tests/bench/sync.py --dtype bfloat16 --transport object_store
python tests/bench/sync.py --stage 3 --ranks 2   # gathered bucket by bucket
python tests/bench/sync.py --layers 2 --rounds 3

The copy is `destination.copy_(source)` on one thread, in the process of rank 0, over memory that was touched before. It and the
syncs take turns. A sync ends when the engine can sample: it holds samples back while it proves what it took, and the seconds of
that are shown beside it. CPU seconds are all of it, of all ranks and the engine: what is left of a comparison on a busy machine.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

from actors import call, spawn
from bench_models import random_model

from launch.ray_session.connect import ray_session
from rlsys.checks import load_checked
from rlsys.config.schema import SyncConfig
from workers.learner.policy import PolicyRank
from workers.rollout.engine_settings import CPU_ENVIRONMENT
from workers.rollout.rollout_worker import RolloutWorker
from workers.sync.verify import combine_ranks

QUARTERS = 4  # which are copied one after the other, to need less memory
CONFIG = Path(__file__).parent.parent.parent / "configs" / "tiny_cpu.yaml"


def save_model(folder: Path, layers: int) -> int:
    """Returns how many parameters it has."""
    from rlsys.tasks.zigzag import make_tokenizer

    model = random_model(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def copied(worker: PolicyRank, count: int, dtype: str) -> tuple[float, float]:
    """Seconds and CPU seconds of a plain copy of so many numbers, in the worker's process."""
    import torch

    kept = vars(worker)  # between calls, so that their memory was touched before
    if "copied" not in kept:
        kept["copied"] = [torch.ones(count // QUARTERS, dtype=getattr(torch, dtype)) for _ in range(2)]
    source, destination = kept["copied"]
    torch.set_num_threads(1)
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(QUARTERS):
        destination.copy_(source)
    seconds = time.perf_counter() - began, time.process_time() - cpu
    torch.set_num_threads(worker.config.policy.threads)
    return seconds


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dtype", default="float32", help="of the engine; the policy's is float32")
    parser.add_argument("--transport", default="shared_memory", choices=["shared_memory", "object_store"])
    parser.add_argument("--stage", type=int, default=0, help="ZeRO stage")
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    settings = [f"policy.ranks={arguments.ranks}", f"policy.zero_stage={arguments.stage}", "policy.threads=1"]
    config = load_checked(CONFIG, [*settings, "rollout.engines=1", f"rollout.dtype={arguments.dtype}"])
    with tempfile.TemporaryDirectory() as name, ray_session(config, Path(name)) as session:
        ray, model = session.ray, Path(name) / "model"
        count = save_model(model, arguments.layers)
        print(
            f"{count / 1e6:.0f} M parameters, {arguments.dtype}, {arguments.transport}, ZeRO {arguments.stage}",
            flush=True,
        )
        logs, start = Path(name), (str(model), arguments.transport)
        ranks = [spawn(PolicyRank, config, i, logs, {"OMP_NUM_THREADS": "1"}) for i in range(arguments.ranks)]
        engine = spawn(RolloutWorker, config, 0, logs, CPU_ENVIRONMENT)
        address, port = ray.get(call(ranks[0], PolicyRank.rendezvous_address))
        starts = [call(rank, PolicyRank.start, address, port, *start) for rank in ranks]
        ray.get([*starts, call(engine, RolloutWorker.start, *start, 7)])
        connection_info = ray.get([call(rank, PolicyRank.connection_info) for rank in ranks])[0]
        connecting = [call(rank, PolicyRank.connect, connection_info) for rank in ranks]
        ray.get([*connecting, call(engine, RolloutWorker.connect, connection_info)])
        workers = [*ranks, engine]

        def verifying(worker: PolicyRank | RolloutWorker, sync: SyncConfig) -> None:
            worker.config = dataclasses.replace(worker.config, sync=sync)

        def cpu() -> float:
            return float(sum(ray.get([w.__ray_call__.remote(lambda _: time.process_time()) for w in workers])))

        ratios: dict[str, list[float]] = {}
        for i in range(arguments.rounds + 1):
            for verify in (True, False):
                plain, plain_cpu = ray.get(ranks[0].__ray_call__.remote(copied, count, arguments.dtype))
                sync = dataclasses.replace(config.sync, verify=verify)
                ray.get([worker.__ray_call__.remote(verifying, sync) for worker in workers])
                before, began = cpu(), time.perf_counter()
                parts = [
                    [call(rank, PolicyRank.send, part) for rank in ranks] for part in range(connection_info["parts"])
                ]
                printing = [call(rank, PolicyRank.fingerprints) for rank in ranks]
                taking = call(engine, RolloutWorker.load_weights, parts, i)
                prints = combine_ranks(ray.get(printing))
                sent = time.perf_counter()
                ray.get(taking)
                taken = time.perf_counter()
                wrong = ray.get(call(engine, RolloutWorker.verify_weights, i, prints)) if verify else ""
                proved, after = time.perf_counter(), cpu()
                assert not wrong, wrong
                del parts
                print(
                    f"copy {plain:.2f} s; verify {verify!s:5} send {sent - began:.2f} s, take {taken - sent:.2f} s"
                    f"{f', engine proves {proved - taken:.2f} s' if verify else ''}; {after - before:.2f} CPU s",
                    flush=True,
                )
                if i:  # the first of each touches its memory for the first time
                    kind = "with proof" if verify else "without proof"
                    ratios.setdefault(f"{kind}, time", []).append((taken - began) / plain)
                    ratios.setdefault(f"{kind}, CPU time", []).append((after - before) / plain_cpu)
        for title, values in ratios.items():
            print(f"sync {title:24} over one copy: {spread(values)}")
        pairs = zip(ratios["with proof, time"], ratios["without proof, time"], strict=True)
        print(f"with proof over without, round by round: {spread([a / b for a, b in pairs])}")


if __name__ == "__main__":
    main()
