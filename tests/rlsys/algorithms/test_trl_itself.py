"""The rows of TRL in `test_published_losses.py` and `test_published_advantages.py`, computed by TRL again."""

import re
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import test_published_advantages
import test_published_losses as published
import torch
from libraries import MASK, advantages_of, fill, import_from, needed, options_of, run_statement, spread
from torch import Tensor

pytestmark = needed
NAMES = [name for name in published.PUBLISHED if name.startswith("TRL ")]
CORRECTION = re.compile(r"(token|sequence)_(truncate|mask) ([\d.]+)(?: to ([\d.]+))?")


@pytest.fixture(scope="module")
def trainer() -> Any:
    return import_from("trl", "trl.trainer.grpo_trainer", "1.16.0").GRPOTrainer


class Alone:
    """Where TRL gathers from all processes."""

    num_processes = 1

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


def trainer_of(trainer: Any, name: str) -> Any:
    """What `_compute_loss` reads of a trainer, with the options that a row names and TRL's defaults."""
    loss_type, given, correction = name.split()[1], options_of(name), CORRECTION.search(name)
    low, high = (correction[3], correction[4]) if correction and correction[4] else (None, correction and correction[3])
    arguments = {"delta": given.get("delta"), "use_bias_correction_kl": False, "steps_per_generation": 1}
    return SimpleNamespace(
        **{"loss_type": loss_type, "beta": given.get("beta", 0.0), "accelerator": Alone()},
        epsilon_low=given.get("epsilon", 0.2),
        epsilon_high=given.get("epsilon_high", given.get("epsilon", 0.2)),
        max_completion_length=int(given.get("max_completion_length", 6)),
        importance_sampling_level="sequence" if "importance_sampling_level=sequence" in name else "token",
        args=SimpleNamespace(**arguments, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05),
        **{"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "_entropy_bonus_enabled": False},
        **{"use_vllm": bool(correction), "vllm_importance_sampling_correction": bool(correction)},
        vllm_importance_sampling_mode=correction and f"{correction[1]}_{correction[2]}",
        vllm_importance_sampling_clip_min=low and float(low),
        vllm_importance_sampling_clip_max=high and float(high),
        **{"aux_loss_enabled": False, "current_gradient_accumulation_steps": 1},
        **{"model": SimpleNamespace(training=True), "_metrics": {"train": defaultdict(list)}},
    )


@pytest.mark.parametrize("name", NAMES)
def test_losses(trainer: Any, name: str) -> None:
    own, old = trainer_of(trainer, name), spread(published.OLD)
    tokens = {"completion_mask": MASK, "tool_mask": None, "old_per_token_logps": old}
    inputs = {
        **{"prompt_ids": torch.zeros(4, 1), "prompt_mask": torch.ones(4, 1), "completion_ids": torch.zeros(4, 6)},
        **{"completion_mask": MASK, "advantages": advantages_of(name), "old_per_token_logps": old},
        **{"ref_per_token_logps": spread(published.REFERENCE), "num_items_in_batch": MASK.sum()},
    }
    if own.use_vllm:
        condition = "self.use_vllm and self.vllm_importance_sampling_correction"
        names = tokens | {"self": own, "sampling_per_token_logps": spread(published.ROLLOUT)}
        inputs["importance_sampling_ratio"] = run_statement(
            trainer._generate_and_score_completions, condition, "vllm_importance_sampling_ratio", names
        )

    def loss(logprobs: Tensor) -> Tensor:
        own._get_per_token_logps_and_entropies = lambda *_, **__: (fill(logprobs), torch.zeros(MASK.shape), None)
        return trainer._compute_loss(own, None, inputs)

    published.assert_equal(published.differentiate(loss), published.PUBLISHED[name])


def test_advantages(trainer: Any) -> None:
    samples = test_published_advantages.SAMPLES
    components = torch.tensor([samples.rewards, samples.second]).float().T
    own = SimpleNamespace(
        multi_objective_aggregation="normalize_then_sum",
        reward_funcs=["one", "other"],
        reward_weights=torch.tensor(test_published_advantages.WEIGHTS),
    )
    names = {"self": own, "rewards_per_func": components, "num_generations": 3, "device": "cpu"}
    names["unscorable_mask"] = torch.zeros(6, dtype=torch.bool)
    condition = "self.multi_objective_aggregation == 'sum_then_normalize'"
    result = run_statement(trainer._generate_and_score_completions, condition, "advantages", names)
    expected = test_published_advantages.PUBLISHED["TRL normalize_then_sum"][2]
    assert result.tolist() == pytest.approx(expected, abs=5e-6)
