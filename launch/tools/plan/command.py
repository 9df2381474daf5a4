"""`rlsys plan`: what a configuration would run where, whether it fits, how long a step takes, and what to change."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from rich.console import Console

from launch.bundles import make_bundles
from launch.printing import write_figures
from launch.tools.estimates.devices import GPUS, NodeSpec, parse_cluster, split_into_nodes
from launch.tools.estimates.host import usable_memory
from launch.tools.estimates.memory import SequenceLengths
from launch.tools.fitting.fit import Fit, check_fit
from launch.tools.plan.lengths import LengthAssumption, LengthRequest, assume_lengths, with_length_limits
from launch.tools.plan.longest import longest_sequences
from launch.tools.plan.offloads import find_offloads
from launch.tools.plan.report import PlanResult, print_plan, to_json
from launch.tools.plan.suggestions import suggest_changes, without_data
from rlsys.checks import check
from rlsys.config.derived import max_new_tokens
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.models.lookup import find_model_shape, model_shape
from rlsys.models.shapes import ModelShape
from rlsys.rewards.settings import reward_services


@dataclass(frozen=True)
class PlanOptions:
    """The options of `rlsys plan`."""

    cluster: str | None = None
    address: str | None = None
    measured: str | None = None
    model_config: str | None = None
    lengths: LengthRequest = field(default_factory=LengthRequest)
    json: str | None = None


def plan(config: Config, path: str, options: PlanOptions, console: Console) -> int:
    """Returns the exit code: 0 if it fits."""
    config = with_length_limits(config, options.lengths)
    model, model_source = check_model_shape(config, options)
    lengths = assume_lengths(config, model, options.lengths)
    nodes, cluster_source = find_nodes(config, options)
    other_models, not_counted = find_other_models(config)

    def try_fit(variant: Config) -> Fit:
        return fit_cluster(variant, model, lengths, nodes, other_models)

    fit = try_fit(config)
    changes = [] if fit.fits else suggest_changes(fit, try_fit)
    seconds: dict[str, float] = {}
    times_lengths = lengths
    if options.measured:
        times_lengths = assume_lengths(config, model, options.lengths, Path(options.measured))
        seconds = measured_seconds(config, Path(options.measured), times_lengths)
    result = PlanResult(
        path,
        fit,
        model_source,
        cluster_source,
        changes,
        seconds,
        times_lengths,
        not_counted,
        find_offloads(fit, try_fit),
        longest_sequences(fit, other_models) if fit.gpus else [],
    )
    print_plan(result, console)
    if options.json:
        write_figures(options.json, to_json(result), console)
    return 0 if result.fits else 1


def fit_cluster(
    config: Config,
    model: ModelShape,
    lengths: LengthAssumption,
    nodes: list[NodeSpec],
    other_models: dict[str, ModelShape],
) -> Fit:
    evaluated = max((max_new_tokens(config, source) for source in config.eval.datasets.values()), default=0)
    limits = SequenceLengths(lengths.prompt, lengths.longest, evaluated, lengths.mean_prompt)
    return check_fit(config, model, limits, lengths.mean, nodes, other_models)


def check_model_shape(config: Config, options: PlanOptions) -> tuple[ModelShape, str]:
    """The shape of the model and its source. Raises the problems of the configuration, except those of its data."""
    try:
        model, source = model_shape(config.model.path, options.model_config or "")
    except ConfigError as error:
        raise ConfigError([*check(without_data(config)), *error.problems]) from None
    if problems := check(without_data(config), model):
        raise ConfigError(problems)
    return model, source


def find_other_models(config: Config) -> tuple[dict[str, ModelShape], list[str]]:
    """The shapes of reward models and reference by path, and for each unknown shape a sentence."""
    shapes: dict[str, ModelShape] = {}
    unknown = []
    services = [service for service in reward_services(config) if service.model_options]
    roles = {service.model_options.get("path", ""): "reward model" for service in services}
    roles |= {config.reference.path: "reference"} if config.reference.path else {}
    roles |= {model.path: f"the model {name}" for name, model in config.models.items()}
    for path, role in roles.items():
        try:
            if shape_and_source := find_model_shape(path):
                shapes[path] = shape_and_source[0]
            else:
                unknown.append(
                    f"{role} {path}: its config.json is not on this machine, and its shape is not in the table. "
                    f"For a hub name: hf download {path} config.json"
                )
        except ConfigError as error:
            unknown.append(f"{role} {error}")
    return shapes, unknown


def find_nodes(config: Config, options: PlanOptions) -> tuple[list[NodeSpec], str]:
    """The nodes to plan for, and where they come from."""
    if options.address:
        from launch.tools.plan.live_cluster import query_nodes

        return query_nodes(options.address), f"the cluster at {options.address}, as far as it is free now"
    if options.cluster:
        return parse_cluster(options.cluster), f"--cluster {options.cluster}"
    if config.cluster.device == "cpu":
        return [this_machine()], "this machine"
    gpu, needed = GPUS["H100"], math.ceil(sum(b.gpus for b in make_bundles(config, training=True)))
    return split_into_nodes(max(needed, 1), gpu), f"as many {gpu.name} as it asks for; --cluster chooses others"


def this_machine() -> NodeSpec:
    memory, _ = usable_memory()
    return NodeSpec(0, None, len(os.sched_getaffinity(0)), memory)


def measured_seconds(config: Config, source: Path, lengths: LengthAssumption) -> dict[str, float]:
    """Seconds of a step by phase, simulated with the costs of a run or a benchmark."""
    from launch.tools.plan import costs
    from launch.tools.plan.simulate import STEPS, SimulatedLoop
    from launch.tools.synthetic import CompletionLengths

    measured = costs.read_costs(source, lengths.typical_prompt, "--measured")
    completions = CompletionLengths(lengths.mean, lengths.longest, config.run.seed)
    report = SimulatedLoop(without_data(config), measured, completions, lengths.typical_prompt).run(STEPS)
    working = fmean(step.working for step in report.steps)
    waiting = max(report.seconds - working, 0.0)
    return {"rollout and rewards": waiting, "score, update, sync": working, "step": report.seconds}
