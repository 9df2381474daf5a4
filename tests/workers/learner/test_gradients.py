"""Comparing gradients, and `rlsys check`: an update does not depend on how it is computed."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.tools import check
from rlsys.batching.packing import empty_pack, unpack
from rlsys.config.schema import Config
from rlsys.tasks import zigzag as tiny_task
from rlsys.types import Floats, Prompt
from workers.fleet.watchdog import Watchdog
from workers.learner.gradients import compare_gradients, with_zero_stage

pytestmark = pytest.mark.long


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


# --- comparing two gradients ------------------------------------------------------------------------------------------


def test_the_difference_is_relative_to_the_whole_and_to_each_parameter() -> None:
    reference = {"a": floats(3, 0), "b": floats(4)}
    difference = compare_gradients([("a", floats(3, 0)), ("b", floats(4.5))], reference)
    assert difference.total == pytest.approx(0.5 / 5)
    assert (difference.largest, difference.parameter) == (pytest.approx(0.5 / 4), "b")


def test_a_tiny_gradient_is_compared_with_a_share_of_the_whole() -> None:
    reference = {"weight": floats(10), "bias": floats(1e-9)}
    difference = compare_gradients([("weight", floats(10)), ("bias", floats(-1e-9))], reference)
    assert difference.largest == pytest.approx(2e-9 / 1e-2), "rounding errors of a zero gradient are no difference"


def test_a_gradient_that_is_not_a_number_is_infinitely_far() -> None:
    assert compare_gradients([("a", floats(math.nan))], {"a": floats(1)}).total == math.inf


def test_a_parameter_without_a_gradient_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 parameters have no gradient: b"):
        compare_gradients([("a", floats(1))], {"a": floats(1), "b": floats(1)})


def test_a_stage_keeps_the_offloading_that_it_supports(tiny: Callable[..., Config]) -> None:
    policy = replace(tiny().policy, offload=["optimizer", "params"])
    assert [tuple(part in with_zero_stage(policy, stage).offload for part in policy.offload) for stage in range(4)] == [
        (False, False),
        (True, False),
        (True, False),
        (True, True),
    ]


# --- real ranks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def trial(tiny: Callable[..., Config]) -> check.UpdateTrial:
    config = tiny("reference.kl_coef=0.1")
    texts = [row["prompt"] for row in tiny_task.rows("zigzag")[: check.PROMPTS]]
    code = {symbol: i for i, symbol in enumerate(tiny_task.SYMBOLS)}
    prompts = [Prompt(f"p{i}", "zigzag", t, [code[c] for c in t], {}) for i, t in enumerate(texts)]
    return check.UpdateTrial(config, check.random_batch(config, prompts, len(tiny_task.SYMBOLS)))


def test_stages_ranks_sequence_parallelism_and_budgets_give_one_gradient(
    trial: check.UpdateTrial, session: Any, model: str, tmp_path: Path
) -> None:
    lines = list(check.compute_updates(trial, session, Watchdog(tmp_path), model, [1, 2]))
    ways = [(n, k, s) for n, k in ((1, 1), (2, 1), (2, 2)) for s in (0, 1, 2, 3)]
    assert sorted((line.ranks, line.sharing, line.stage) for line in lines[::3]) == ways
    assert [line.tokens_per_pack for line in lines[:3]] == check.pack_budgets(trial.input_lengths, 4096)
    for line in lines:
        assert line.within_tolerance("float32", lines[0].loss), line
    assert max(line.total_difference for line in lines) < 1e-5
    assert max(line.total_difference for line in lines) > 0, "the ways to compute it really differ"
    assert abs(lines[0].loss) > 1e-4, "the loss is not trivial"


def gradient_and_its_parts(
    trial: check.UpdateTrial, ranks: Any, model: str, stage: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The gradient of a mini-batch on two ranks, and the plain sum of those of its packs, each computed alone."""
    ranks.call_all("build", model, stage)
    packs = trial.packs(2, max(trial.input_lengths))
    trial.fill_columns(unpack(packs, ranks.scatter("score", packs), len(trial.members)))
    packs = trial.packs(2, max(trial.input_lengths))
    assert len(packs[0]) > 3
    [(_, together), _] = ranks.scatter("gradient", packs)
    total = {name: np.zeros(tensor.shape) for name, tensor in together.items()}
    for single in [*packs[0], *packs[1]]:
        [(_, gradient), _] = ranks.scatter("gradient", [[single], [empty_pack(trial.columns)]])
        total = {name: total[name] + gradient[name].astype(np.float64) for name in total}
    return together, total


@pytest.mark.parametrize(
    ("grad_dtype", "limits"),
    [
        ("float32", {1: (1e-3, 1e-2), 2: (0, 1e-6), 3: (0, 1e-6)}),  # ZeRO 1 adds up packs in bfloat16
        ("bfloat16", {2: (1e-3, 1e-2)}),
    ],
)
def test_bfloat16_ranks_add_up_gradients_in_the_format_that_is_set(
    trial: check.UpdateTrial, session: Any, model: str, tmp_path: Path, grad_dtype: str, limits: dict[int, Any]
) -> None:
    policy = replace(trial.config.policy, dtype="bfloat16", grad_dtype=grad_dtype)
    trial.config = replace(trial.config, policy=policy)
    with check.gradient_ranks(trial.config, session, Watchdog(tmp_path), 2) as ranks:
        for stage, (least, most) in limits.items():
            together, total = gradient_and_its_parts(trial, ranks, model, stage)
            gap = math.sqrt(sum(np.square(together[name] - total[name]).sum() for name in total))
            assert least <= gap / math.sqrt(sum(np.square(part).sum() for part in total.values())) <= most, stage


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_that_is_left_out_is_more_than_the_tolerance(
    trial: check.UpdateTrial, session: Any, model: str, tmp_path: Path, dtype: str
) -> None:
    trial.config = replace(trial.config, policy=replace(trial.config.policy, dtype=dtype))
    sequence_of_token = np.repeat(np.arange(len(trial.batch.samples)), trial.batch.lengths)
    with check.gradient_ranks(trial.config, session, Watchdog(tmp_path), 1) as ranks:
        ranks.call_all("build", model, 2)
        reference = check.compute_reference(trial, ranks, Watchdog(tmp_path))
        shortest = int(np.argmin(trial.batch.lengths))
        trial.weights = np.where(sequence_of_token == shortest, np.float32(0), trial.weights)
        [(loss, difference)] = ranks.scatter("compare", trial.packs(1, 4096), reference)
    update = check.CheckedUpdate(1, 1, 2, 4096, loss, difference.total, difference.largest, difference.parameter)
    assert not update.within_tolerance(dtype, loss)
