"""Checks the machines: cluster, sync and watchdog."""

from collections.abc import Iterator

from rlsys.checks.rewards import all_functions
from rlsys.checks.sampling import updates_while_sampling
from rlsys.config.schema import Config
from rlsys.config.transports import TRANSPORTS
from rlsys.episodes.settings import plays
from rlsys.rewards.settings import function_deadline

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads the first that is set
SET_BY_RLSYS = ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_cluster(c: Config) -> Iterator[str]:
    yield from check_environment(c)
    if c.cluster.placement != "colocated":
        return
    if c.cluster.device == "cpu":
        yield "cluster.placement colocated shares GPUs; cluster.device is cpu. Use separate."
        return
    for role, ranks in (
        ("critic", c.critic.ranks * (c.algorithm.advantage == "gae")),
        ("reference", c.reference.ranks),
    ):
        if ranks > c.policy.ranks:
            yield (
                f"{role}.ranks ({ranks}) is more than the GPUs of cluster.placement colocated, "
                f"policy.ranks ({c.policy.ranks}). Use {c.policy.ranks} or fewer."
            )
    if c.rollout.engines * c.rollout.tensor_parallel != c.policy.ranks:
        yield (
            "cluster.placement colocated puts one policy rank on each engine GPU, but rollout.engines "
            f"({c.rollout.engines}) × rollout.tensor_parallel ({c.rollout.tensor_parallel}) is not policy.ranks "
            f"({c.policy.ranks}). Use policy.ranks {c.rollout.engines * c.rollout.tensor_parallel}, or placement separate."
        )
    if updates_while_sampling(c) > 0:
        yield (
            f"pipeline.max_lag {c.pipeline.max_lag} generates while training; colocated GPUs do one at a time. "
            f"Use placement separate, or max_lag {int(bool(c.rollout.oversample))}."
        )


def check_environment(c: Config) -> Iterator[str]:
    if name := next((n for n in c.cluster.env if n in ALLOCATOR_VARIABLES), ""):
        expandable = "expandable_segments:true" in c.cluster.env[name].lower()
        if c.cluster.placement == "colocated" and expandable:
            yield (
                f"cluster.env: {name} has expandable_segments, which an engine on the same GPU cannot open. Leave it out, "
                "or use cluster.placement separate."
            )
    if name := next((n for n in c.cluster.env if n in SET_BY_RLSYS), ""):
        yield f"cluster.env: {name} is set for each worker by rlsys. Leave it out."


def check_sync(c: Config) -> Iterator[str]:
    transport = TRANSPORTS.get(c.sync.transport)  # None: auto
    if not transport:
        return
    if transport.needs_gpus and c.cluster.device == "cpu":
        yield f"sync.transport {c.sync.transport} needs GPUs; cluster.device is cpu. Use auto."
    elif transport.placement not in ("", c.cluster.placement):
        yield f"sync.transport {c.sync.transport} {transport.elsewhere}"


def check_watchdog(c: Config) -> Iterator[str]:
    timed = [(key, f) for key, f in all_functions(c) if isinstance(f.options.get("timeout_s", 0), int | float)]
    deadlines = [(function_deadline(f, c.reward.timeout_s), key) for key, f in timed]
    if plays(c):
        deadlines.append((c.episode.step_timeout_s, "a step of an episode (episode.step_timeout_s)"))
    slowest, key = max(deadlines, default=(0.0, ""))
    if not c.watchdog.stall_s > slowest:
        yield (
            f"watchdog.stall_s ({c.watchdog.stall_s:g}) is not more than what {key} may take ({slowest:g} s): every "
            "slow one would count as a stall. Use a larger stall_s, or shorter deadlines."
        )
