import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlsys.forward.attention import PACKED_ATTENTION, packed_attention
from rlsys.forward.layout import PackToBlocks, SharedPrefix, build_layout
from rlsys.tasks import zigzag

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=7)


def grouped_heads() -> Qwen2ForCausalLM:
    """Two key/value heads shared by four query heads."""
    torch.manual_seed(1)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=13,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def random_tokens(lengths: list[int]) -> torch.Tensor:
    return torch.randint(0, 13, (sum(lengths),), generator=torch.Generator().manual_seed(len(lengths)))


def logits_packed(model, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    model.set_attn_implementation(PACKED_ATTENTION)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return model(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        layout=build_layout(lengths, [-1] * len(lengths)),
    ).logits[0]


def logits_one_by_one(model, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split(lengths)])


@given(LENGTHS)
def test_copying_into_blocks_and_back_is_the_identity(lengths):
    layout = build_layout(lengths, [-1] * len(lengths))
    cells = torch.cat([block.tokens.flatten() for block in layout.blocks])
    assert cells[layout.cell_of_token].tolist() == list(range(sum(lengths)))


@given(LENGTHS)
def test_each_row_of_a_block_is_one_sequence_from_its_start(lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    rows = [row for block in build_layout(lengths, [-1] * len(lengths)).blocks for row in block.tokens.tolist()]
    assert sorted(row[0] for row in rows) == starts[:-1]
    for row in rows:
        length = lengths[starts.index(row[0])]
        assert row[:length] == list(range(row[0], row[0] + length))
        assert set(row[length:]) <= {row[0] + length - 1}


@given(LENGTHS)
def test_at_most_a_fifth_of_a_block_is_padding(lengths):
    starts = dict(zip(torch.tensor([0, *lengths]).cumsum(0).tolist(), lengths, strict=False))
    for block in build_layout(lengths, [-1] * len(lengths)).blocks:
        real = sum(starts[row[0]] for row in block.tokens.tolist())
        assert real >= 0.8 * block.tokens.numel()


def test_the_example_in_the_docstring():
    layout = build_layout([2, 2, 2], [-1, 0, 0])
    assert [(b.tokens.tolist(), b.prefix, b.shared_prefixes) for b in layout.blocks] == [
        ([[0, 1]], 0, []),
        ([[0, 1, 2, 3], [0, 1, 4, 5]], 2, [SharedPrefix(((0, 2),), 0, 2)]),
    ]
    assert layout.cell_of_token.tolist() == [0, 1, 2, 3, 4, 5]
    assert layout.blocks[1].mask.tolist() == [[True, True, True, False], [True, True, True, True]]


def test_copying_into_blocks_has_the_gradient_of_plain_indexing():
    """Prompts of three tokens and of one token, completions of several lengths, and a tree of turns below one of them."""
    lengths, parents = [3, 4, 2, 3, 2, 2, 4, 1, 5, 1, 5], [-1, 0, 1, 2, 2, 1, 0, -1, 7, 7, -1]
    layout = build_layout(lengths, parents)
    x = torch.randn(
        sum(lengths), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    for with_prefix in (False, True):
        cells = [b.tokens if with_prefix else b.tokens[:, b.prefix :] for b in layout.blocks]
        weights = [torch.randn(*indices.shape, 6, dtype=torch.float64) for indices in cells]
        for block, w in zip(layout.blocks, weights, strict=True):  # padding gets no gradient
            first = block.prefix if with_prefix else 0
            repeated = block.tokens[:, block.prefix + 1 :] == block.tokens[:, block.prefix : -1]
            w[:, first + 1 :][repeated] = 0
        ours = sum((c * w).sum() for c, w in zip(PackToBlocks.apply(x, layout, with_prefix), weights, strict=True))
        theirs = sum((x[indices] * w).sum() for indices, w in zip(cells, weights, strict=True))
        assert ours.item() == pytest.approx(theirs.item())
        torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x))


@pytest.mark.parametrize("build", [lambda: zigzag.build_model(0), grouped_heads], ids=["tiny", "grouped heads"])
@settings(max_examples=12)
@given(lengths=LENGTHS)
def test_packed_sequences_are_computed_as_if_each_were_alone(build, lengths):
    model, tokens = build(), random_tokens(lengths)
    weights = torch.linspace(-1, 1, sum(lengths) * 13).view(-1, 13)
    results, gradients = [], []
    for forward in (logits_one_by_one, logits_packed):
        model.zero_grad()
        logits = forward(model, tokens, lengths)
        (logits * weights).sum().backward()
        results.append(logits.detach())
        gradients.append({name: w.grad.clone() for name, w in model.named_parameters()})
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
    for name, gradient in gradients[0].items():
        rounding = 1e-5 * gradient.abs().max().item()  # in sums whose terms cancel
        torch.testing.assert_close(gradients[1][name], gradient, atol=max(rounding, 1e-4), rtol=1e-4, msg=name)


def test_a_sequence_does_not_see_its_neighbors():
    model, lengths = zigzag.build_model(0), [4, 6, 5]
    tokens = random_tokens(lengths)
    before = logits_packed(model, tokens, lengths)
    tokens[4:10] = (tokens[4:10] + 1) % 13
    after = logits_packed(model, tokens, lengths)
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[10:], after[10:])
    assert not torch.allclose(before[4:10], after[4:10])


def test_a_token_does_not_see_later_tokens():
    model, tokens = zigzag.build_model(0), random_tokens([6])
    before = logits_packed(model, tokens, [6])
    tokens[3] = (tokens[3] + 1) % 13
    after = logits_packed(model, tokens, [6])
    torch.testing.assert_close(before[:3], after[:3])
    assert not torch.allclose(before[3:], after[3:])


def test_a_query_sees_its_window_and_nothing_before_it():
    """With scores of 0, attention is the mean of the values that a query sees."""
    x, values = torch.zeros(1, 1, 8, 1), torch.arange(8.0).view(1, 1, 8, 1)
    layout = build_layout([5, 2, 1], [-1, 0, -1])  # a prompt 0 … 4, its continuation 5 6, and a sequence 7
    output, _ = packed_attention(torch.nn.Module(), x, x, values, None, layout=layout, sliding_window=3)
    seen = [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [7]]
    torch.testing.assert_close(output.flatten(), torch.tensor([sum(keys) / len(keys) for keys in seen]))
