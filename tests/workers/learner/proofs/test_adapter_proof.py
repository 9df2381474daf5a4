"""The proof before the first sync finds adapters that are left out, scaled wrongly, or transposed, in policy or sync."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.forward import lora
from workers.learner.files.loading import load_policy
from workers.learner.proofs.adapters import prove_adapters
from workers.sync.sending import PolicyWeights

WHOLE = type("Whole", (), {"gathered": lambda self, *parameters: nullcontext()})()


def merge_transposed(weight: Any, a: Any, b: Any, scale: float, format: Any) -> Any:
    update = scale * (b @ a)
    return weight + (update.t() if update.shape[0] == update.shape[1] else update)


def merge_twice_as_much(weight: Any, a: Any, b: Any, scale: float, format: Any) -> Any:
    return weight + 2 * scale * (b @ a)


def leave_out_in_forward(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    next(iter(lora.adapted_layers(lm).values())).adapted = False


def leave_out_in_sync(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora.LoraLinear, "merged", lambda layer: layer.weight)


def scale_by_alpha_alone(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in lora.adapted_layers(lm).values():
        layer.scale = 8.0


def scale_wrongly_in_sync(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lora.LoraLinear,
        "merged",
        lambda layer: merge_twice_as_much(layer.weight, layer.lora_A, layer.lora_B, 2.0, None),
    )


def transpose_everywhere(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "merge", merge_transposed)


def transpose_in_sync(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lora.LoraLinear, "merged", lambda layer: merge_transposed(layer.weight, layer.lora_A, layer.lora_B, 2.0, None)
    )


def use_other_weights_in_sync(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = lora.LoraLinear.merged
    monkeypatch.setattr(lora.LoraLinear, "merged", lambda layer: original(layer).roll(1, 0))


@pytest.fixture(params=["float32", "bfloat16", "float32 bfloat16", "bfloat16 float32"])
def prove(request: Any, tiny: Callable[..., Config], model: str) -> Callable[..., Any]:
    policy, rollout = request.param.split()[0], request.param.split()[-1]
    config = tiny("policy.lora={rank: 4, alpha: 8}", f"policy.dtype={policy}", f"rollout.dtype={rollout}")
    packed = load_policy(config, model)

    def run(spoil: Callable[..., None] = lambda *_: None, monkeypatch: Any = None) -> Any:
        spoil(packed.lm, monkeypatch)
        weights = PolicyWeights(packed.lm, WHOLE, getattr(torch, rollout), 0, 1)
        with torch.no_grad():
            prove_adapters(packed.lm, lambda packs: [packed(pack) for pack in packs], weights, 2.0)
        return packed.lm

    return run


def test_right_adapters_pass_and_are_as_before(prove: Callable[..., Any]) -> None:
    for layer in lora.adapted_layers(prove()).values():
        assert not layer.lora_B.any()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (leave_out_in_forward, "is not what the policy computes with"),
        (leave_out_in_sync, "is not sent"),
        (scale_by_alpha_alone, "is not sent"),
        (scale_wrongly_in_sync, "is not sent"),
        (transpose_everywhere, "is not sent"),
        (transpose_in_sync, "is not sent"),
        (use_other_weights_in_sync, "is not sent"),
    ],
)
def test_a_wrong_adapter_is_found(
    prove: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., None], problem: str
) -> None:
    with pytest.raises(AssertionError, match=rf"q_proj\.weight: W \+ 2 B A {problem}"):
        prove(spoil, monkeypatch)


def test_a_layer_that_is_not_called_is_refused(prove: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def bypass(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        mlp = lm.model.layers[0].mlp
        monkeypatch.setattr(
            mlp, "forward", lambda x: mlp.down_proj(mlp.act_fn(x @ mlp.gate_proj.weight.t()) * mlp.up_proj(x))
        )

    with pytest.raises(ConfigError, match=r"does not call model\.layers\.0\.mlp\.gate_proj as a layer"):
        prove(bypass, monkeypatch)
