"""AdamW's step, as the paper has it, in the ways that we use it."""

import math

import pytest
import torch

from workers.learner.guarded_adamw import GuardedAdamW

LR, BETA1, BETA2, DECAY, EPS = 0.1, 0.9, 0.95, 0.01, 1e-8


@pytest.mark.parametrize("fused", [False, True])
def test_two_steps_with_one_left_out_between_them_are_those_of_the_paper(fused: bool) -> None:
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    adam = GuardedAdamW([weight], lr=LR, betas=(BETA1, BETA2), weight_decay=DECAY, fused=fused)
    adam.create_moments([weight])
    x, m, v = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for step, gradient in ((1, [0.5, 3.0]), (0, [9.0, 9.0]), (2, [-1.0, 0.25])):
        weight.grad = torch.tensor(gradient)
        adam.allow_step(step > 0)
        adam.step()
        for i, g in enumerate(gradient) if step else ():
            m[i], v[i] = BETA1 * m[i] + (1 - BETA1) * g, BETA2 * v[i] + (1 - BETA2) * g * g
            update = m[i] / (1 - BETA1**step) / (math.sqrt(v[i] / (1 - BETA2**step)) + EPS)
            x[i] = x[i] * (1 - LR * DECAY) - LR * update
        assert weight.tolist() == pytest.approx(x, rel=1e-6)
        assert adam.stepped == (step > 0)
    assert adam.state[weight]["step"].item() == 2


def test_a_fused_step_is_counted_beside_its_tensor() -> None:
    weight = torch.zeros(2, device="meta", requires_grad=True)
    for fused, device in ((True, "meta"), (False, "cpu")):
        adam = GuardedAdamW([weight], fused=fused)
        adam.create_moments([weight])
        assert adam.state[weight]["step"].device.type == device
