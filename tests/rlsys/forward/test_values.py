import plain
import pytest
import torch
from fakes import make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_columns import draw_columns

from rlsys.batching.packing import empty_pack, pack, unpack
from rlsys.forward.attention import PACKED_ATTENTION
from rlsys.forward.values import PackedValues, value_loss
from rlsys.tasks import zigzag
from rlsys.types import Batch, Columns, Pack

# --- the critic -------------------------------------------------------------------------------------------------------

BATCH = make_batch([0] * 4, [0, 0, 1, 1], lengths=[1, 6, 3, 4], prompt_lengths=[5, 1])


def critic(head: float = 0.0) -> PackedValues:
    """A critic with a head of zeros, or of random weights of this size."""
    model = zigzag.build_model(0)
    model.set_attn_implementation(PACKED_ATTENTION)
    values = PackedValues(model)
    if head:
        torch.nn.init.normal_(values.head.weight, std=head, generator=torch.Generator().manual_seed(1))
        torch.nn.init.constant_(values.head.bias, 0.25)
    return values


def make_packs(batch: Batch, budget: int = 1000) -> list[list[Pack]]:
    return pack(batch, range(len(batch.samples)), ranks=1, tokens_per_pack=budget)


def test_an_untrained_critic_expects_no_reward():
    [[p]] = make_packs(BATCH)
    assert critic()(p).tolist() == [0.0] * 14


@pytest.mark.parametrize("budget", [8, 12, 1000])
def test_packed_values_equal_those_of_each_sequence_alone(budget):
    packs, model = make_packs(BATCH, budget), critic(head=0.5)
    with torch.no_grad():
        result = BATCH.split(unpack(packs, [[model(p).numpy() for p in rank_packs] for rank_packs in packs], 4))
    decoder = zigzag.build_model(0).get_decoder()
    for sample, group, values in zip(BATCH.samples, BATCH.groups, result, strict=True):
        prompt = BATCH.prompts[group].tokens
        with torch.no_grad():
            hidden = decoder(input_ids=torch.tensor([[*prompt, *sample.tokens]])).last_hidden_state[0]
            alone = (hidden @ model.head.weight[0] + model.head.bias)[len(prompt) - 1 : -1]
        assert values.tolist() == pytest.approx(alone.tolist(), abs=1e-5)
        assert len(values) == len(sample.tokens)


@pytest.mark.parametrize("changed", range(4))
def test_a_value_depends_on_earlier_tokens_but_not_on_its_own_token(changed):
    batch = make_batch([0], [0], lengths=[4], prompt_lengths=[3])
    model = critic(head=0.5)
    with torch.no_grad():
        before = model(make_packs(batch)[0][0])
        tokens = batch.samples[0].tokens
        tokens[changed] = 2 if tokens[changed] != 2 else 3
        after = model(make_packs(batch)[0][0])
    assert torch.equal(after[: changed + 1], before[: changed + 1])
    assert (after[changed + 1 :] != before[changed + 1 :]).all()


def test_the_gradient_reaches_the_head_and_every_layer_below():
    [[p]] = make_packs(BATCH)
    model = critic(head=0.5)
    value_loss(model(p), torch.zeros(14), torch.ones(14)).sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.any(), name


def test_a_head_of_zeros_gets_gradients_but_passes_none_on():
    [[p]] = make_packs(BATCH)
    model = critic()
    value_loss(model(p), torch.zeros(14), torch.ones(14)).sum().backward()
    assert model.head.weight.grad.any()
    assert model.head.bias.grad.item() == pytest.approx(-14)  # d ½(v - 1)² / dv = -1 at each of 14 tokens
    assert not any(w.grad.any() for w in model.decoder.parameters())


def test_a_critic_can_learn_its_returns():
    [[p]] = make_packs(make_batch([0] * 2, [0, 1], lengths=[6, 8], prompt_lengths=[5, 3]))
    model, returns = critic(), torch.linspace(-1, 1, 14)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        values = model(p)
        value_loss(values, values.detach(), returns).mean().backward()
        optimizer.step()
    assert (model(p) - returns).abs().max() < 0.1


def test_an_empty_pack_has_no_values_but_a_backward_pass():
    model = critic(head=0.5)
    values = model(empty_pack(Columns()))
    assert values.shape == (0,)
    values.sum().backward()
    assert all(w.grad is not None and not w.grad.any() for w in model.decoder.layers.parameters())


def test_half_precision_weights_still_give_full_precision_values():
    lm = zigzag.build_model(0).bfloat16()
    lm.set_attn_implementation(PACKED_ATTENTION)
    model = PackedValues(lm)
    torch.nn.init.constant_(model.head.weight, 0.01)
    assert model.head.weight.dtype == torch.bfloat16
    assert model(make_packs(BATCH)[0][0]).dtype == torch.float32


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (0.5, 0.5, 1.0, 0.125, -0.5),  # ½ · 0.5²
        (0.6, 0.5, 1.0, 0.08, -0.4),  # moved by 0.1 of 0.2
        (0.9, 0.5, 1.0, 0.045, 0.0),  # moved by more than 0.2: counts as 0.7 and learns no more
        (0.1, 0.5, 1.0, 0.405, -0.9),  # moved away: the larger of the two losses, which pulls back
        (1.5, 0.5, 1.0, 0.125, 0.5),  # overshot: 0.5 away, which is further than 0.7 is
    ],
)
def test_value_losses_by_hand(value, old, target, loss, slope):
    values = torch.tensor([value], requires_grad=True)
    result = value_loss(values, torch.tensor([old]), torch.tensor([target]))
    result.sum().backward()
    assert result.item() == pytest.approx(loss, rel=1e-5)
    assert values.grad.item() == pytest.approx(slope, rel=1e-5)


@settings(max_examples=50)
@given(draw_columns(), st.sampled_from([0.1, 0.2, 0.7]))
def test_value_losses_and_slopes_equal_the_plain_formula(columns, clip):
    values = torch.tensor(columns[0], dtype=torch.float32, requires_grad=True)
    old, returns = (torch.tensor(c, dtype=torch.float32) for c in columns[1:3])
    result = value_loss(values, old, returns, clip=clip)
    result.sum().backward()
    losses, slopes = plain.value_loss(*columns[:3], clip=clip)
    assert result.tolist() == pytest.approx(losses, rel=1e-5, abs=1e-5)
    assert values.grad.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-5)

    def total(at: list[float]) -> float:
        return sum(plain.value_loss(at, *columns[1:3], clip=clip)[0])

    assert slopes == pytest.approx(plain.differences(total, columns[0]), rel=1e-4, abs=1e-4)


def test_half_precision_values_are_compared_in_full_precision():
    columns = [torch.linspace(-1, 1, 9).bfloat16(), torch.linspace(-0.8, 1, 9).bfloat16(), torch.ones(9).bfloat16()]
    result = value_loss(*columns)
    assert result.dtype == torch.float32
    assert torch.equal(result, value_loss(*(c.float() for c in columns)))


def test_without_values_there_are_no_value_losses():
    assert value_loss(torch.zeros(0), torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_values_of_different_shape_are_refused_with_all_shapes():
    with pytest.raises(ValueError, match=r"^value_loss: values \[2\], old \[1\] and returns \[2\] must all be \[T\]"):
        value_loss(torch.zeros(2), torch.zeros(1), torch.zeros(2))


def test_the_gradient_of_a_value_loss_flows_into_the_values_alone():
    values, old, returns = (torch.tensor([v], requires_grad=True) for v in (0.6, 0.5, 2.0))
    value_loss(values, old, returns).sum().backward()
    assert old.grad is None
    assert returns.grad is None


def test_a_negative_clip_of_values_is_refused():
    with pytest.raises(ValueError, match=r"^value_loss: clip is -0\.1"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip=-0.1)
