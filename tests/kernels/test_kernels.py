"""Every kernel against torch in double precision, and what cannot be compared by what it must be."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from discern import kernels
from discern.training.config import OptimizerConfig
from discern.training.optimizer import Optimizer, clip_gradients
from tests.paths import on_path

# Odd widths run through the tails of the 16 lanes, the large one through several threads.
SHAPES = [(1, 1), (3, 16), (7, 37), (50, 64), (33, 100), (70, 257)]


@pytest.fixture(autouse=True)
def _kernels() -> None:
    next(on_path("kernels"))


def draws(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).requires_grad_()


def compare(ours: Tensor, reference: Tensor, inputs: list[Tensor], tolerance: float = 1e-6) -> None:
    """Values, and the gradients of a random weighted sum, relative to their largest."""
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9))
    found = [ours.detach(), *torch.autograd.grad((ours.float() * weights).sum(), inputs)]
    wanted = [reference.detach(), *torch.autograd.grad((reference * weights).sum(), inputs)]
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        scale = max(float(other.abs().max()), 1.0)
        assert float((one.double() - other).abs().max()) <= tolerance * scale, f"number {number} of value and gradients"


@pytest.mark.parametrize("shape", SHAPES)
def test_gelu(shape: tuple[int, int]) -> None:
    x, bias = draws(*shape, scale=3), draws(shape[1], seed=1)
    compare(kernels.bias_gelu(x, bias), F.gelu(x.double() + bias.double()), [x, bias])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_geglu(shape: tuple[int, int], biased: bool) -> None:
    x, bias = draws(shape[0], 2 * shape[1], scale=3), draws(2 * shape[1], seed=1) if biased else None
    left, right = (x.double() if bias is None else x.double() + bias.double()).chunk(2, -1)
    compare(kernels.geglu(x, bias), F.gelu(left) * right, [x] if bias is None else [x, bias])


def test_geglu_in_bfloat16_is_that_in_float32_but_for_rounding() -> None:
    low = draws(4, 10, 2 * 37, scale=3).detach().bfloat16().requires_grad_()
    full = low.detach().float().requires_grad_()
    weights = draws(4, 10, 37, seed=9).detach().bfloat16()
    results = []
    for x in (low, full):
        output = kernels.geglu(x)
        assert output.dtype == x.dtype
        results.append((output.detach().float(), torch.autograd.grad(output, x, weights.to(x.dtype))[0].float()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=4e-3)


def test_gelu_without_a_bias() -> None:
    x = draws(33, 100, scale=3)
    compare(kernels.bias_gelu(x, None), F.gelu(x.double()), [x])


def drawn_norm(columns: int, *, biased: bool = True) -> nn.LayerNorm:
    norm = nn.LayerNorm(columns, bias=biased)
    with torch.no_grad():
        norm.weight.copy_(draws(columns, seed=3))
        if biased:
            norm.bias.copy_(draws(columns, seed=4))
    return norm


def double_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """The LayerNorm by torch, in double precision."""
    return F.layer_norm(
        x, norm.normalized_shape, norm.weight.double(), norm.bias if norm.bias is None else norm.bias.double(), norm.eps
    )


def test_residual_norm_without_biases() -> None:
    part, residual, norm = draws(33, 100), draws(33, 100, seed=2), drawn_norm(100, biased=False)
    ours, _ = kernels.residual_norm(part, None, residual, norm, 0.0, want_low=False)
    compare(ours, double_norm(part.double() + residual.double(), norm), [part, residual, norm.weight])


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("used", ["both", "total", "normalized"])
def test_add_norm(shape: tuple[int, int], biased: bool, used: str) -> None:
    part, residual, norm = draws(*shape), draws(*shape, seed=2), drawn_norm(shape[1], biased=biased)
    bias = draws(shape[1], seed=1) if biased else None
    summed = residual.double() + (part.double() if bias is None else part.double() + bias.double())
    reference = {"total": summed, "normalized": double_norm(summed, norm)}
    ours = dict(zip(("total", "normalized"), kernels.add_norm(part, bias, residual, norm, 0.0, want_low=False), strict=True))
    inputs = [part, residual, *([] if bias is None else [bias])]
    if used != "total":
        inputs += [*norm.parameters()]
    names = ["total", "normalized"] if used == "both" else [used]
    compare(torch.cat([ours[name] for name in names]), torch.cat([reference[name] for name in names]), inputs)


def test_add_norm_in_bfloat16() -> None:
    part, residual, norm = draws(40, 96).detach().bfloat16().requires_grad_(), draws(40, 96, seed=2), drawn_norm(96, biased=False)
    total, normalized = kernels.add_norm(part, None, residual, norm, 0.0, want_low=True)
    summed = residual.double() + part.double()
    torch.testing.assert_close(total.double(), summed, atol=1e-6, rtol=0)
    torch.testing.assert_close(normalized, double_norm(summed, norm).bfloat16(), atol=0.01, rtol=0.01)
    gradients = draws(40, 96, seed=5).detach(), draws(40, 96, seed=6).detach().bfloat16()
    found = torch.autograd.grad((total, normalized), [part, residual, norm.weight], gradients)
    wanted = torch.autograd.grad(
        (summed, double_norm(summed, norm)), [part, residual, norm.weight], tuple(gradient.double() for gradient in gradients)
    )
    assert [one.dtype for one in found] == [torch.bfloat16, torch.float32, torch.float32]
    for one, other, tolerance in zip(found, wanted, (0.02, 1e-5, 1e-4), strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("with_residual", [True, False])
def test_residual_norm(shape: tuple[int, int], with_residual: bool) -> None:
    part, bias, residual = draws(*shape), draws(shape[1], seed=1), draws(*shape, seed=2)
    norm = drawn_norm(shape[1])
    if with_residual:
        ours, low = kernels.residual_norm(part, bias, residual, norm, 0.0, want_low=False)
        summed, inputs = part.double() + bias.double() + residual.double(), [part, bias, residual]
    else:
        ours, low = kernels.residual_norm(part, None, None, norm, 0.0, want_low=False)
        summed, inputs = part.double(), [part]
    assert low is ours
    compare(ours, double_norm(summed, norm), [*inputs, norm.weight, norm.bias])


def test_the_low_copy_of_a_norm_is_its_rounding_and_both_gradients_count() -> None:
    part, norm = draws(9, 64).detach().bfloat16().requires_grad_(), nn.LayerNorm(64)
    values, low = kernels.residual_norm(part, None, None, norm, 0.0, want_low=True)
    assert torch.equal(low, values.bfloat16())
    both = torch.autograd.grad((values * 2).sum() + (low * part.detach()).sum(), part)[0]
    values, low = kernels.residual_norm(part, None, None, norm, 0.0, want_low=True)
    alone = torch.autograd.grad((values * (2 + part.detach().float())).sum(), part)[0]
    torch.testing.assert_close(both, alone, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("columns", [2, 16, 37, 300, 5003])
def test_cross_entropy(columns: int) -> None:
    logits = draws(40, columns, scale=4)
    targets = torch.randint(0, columns, (40,), generator=torch.Generator().manual_seed(1))
    compare(kernels.cross_entropy_sum(logits, targets), F.cross_entropy(logits.double(), targets, reduction="sum"), [logits])


def test_a_loss_that_is_not_finite_stays_so() -> None:
    logits = torch.zeros(3, 40)
    logits[1, 7] = torch.nan
    assert kernels.cross_entropy_sum(logits, torch.tensor([1, 2, 3])).isnan()
    assert kernels.bias_gelu(logits, torch.zeros(40)).isnan().sum() == 1
    norm = nn.LayerNorm(40)
    assert kernels.residual_norm(logits, None, None, norm, 0.0, want_low=True)[1][1].isnan().all()
    assert kernels.add_norm(logits, None, torch.zeros(3, 40), norm, 0.0, want_low=True)[1][1].isnan().all()
    assert kernels.geglu(logits).isnan().sum() == 1


def written_out(packed: Tensor, heads: int, lengths: list[int]) -> Tensor:
    """Attention of each span by torch, in double precision."""
    parts = []
    for span in packed.double().split(lengths):
        query, key, value = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in span.chunk(3, 1))
        parts.append(F.scaled_dot_product_attention(query, key, value).transpose(0, 1).flatten(1))
    return torch.cat(parts)


SPANS = [(16, 2, [5, 40, 1, 33]), (64, 4, [128, 100]), (20, 3, [70, 16]), (64, 1, [300]), (1, 1, [2, 1]), (48, 2, [31, 32, 33])]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize(("size", "heads", "lengths"), SPANS)
def test_attention(size: int, heads: int, lengths: list[int]) -> None:
    packed = draws(sum(lengths), 3 * size * heads)
    compare(kernels.attention(packed, heads, starts(lengths), 0.0), written_out(packed, heads, lengths), [packed])


@pytest.mark.parametrize(("size", "heads", "lengths"), SPANS)
@pytest.mark.parametrize("probability", [0.0, 0.2])
def test_attention_in_bfloat16_is_that_in_float32_but_for_rounding(
    size: int, heads: int, lengths: list[int], probability: float
) -> None:
    low = draws(sum(lengths), 3 * size * heads).detach().bfloat16().requires_grad_()
    full = low.detach().float().requires_grad_()
    results = []
    for packed in (low, full):
        torch.manual_seed(3)  # the same elements dropped
        output = kernels.attention(packed, heads, starts(lengths), probability)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
        results.append((output.detach().float(), torch.autograd.grad(output, packed, weights)[0].float()))
    for one, other in zip(*results, strict=True):
        assert float((one - other).abs().max() / other.abs().max()) < 0.02


@pytest.mark.parametrize("window", [None, 2])
def test_spans_do_not_see_each_other(window: int | None) -> None:
    packed = draws(12, 96).detach()
    changed = packed.clone()
    changed[7:] = 100.0
    first, second = (kernels.attention(value, 2, starts([7, 5]), 0.0, window) for value in (packed, changed))
    assert torch.equal(first[:7], second[:7])


WINDOWS = [0, 1, 5, 16, 64, 1000]
WINDOWED_LENGTHS = [1, 2, 3, 4, 6, 16, 31, 32, 33, 63, 64, 65, 66, 95, 97, 128, 129, 131, 200]
"""Spans around the windows, and around the borders of tiles of 32 queries."""


def windowed(packed: Tensor, heads: int, lengths: list[int], window: int, factors: list[Tensor] | None = None) -> Tensor:
    """Attention of each span within a window by torch, in double precision; `factors` multiply its probabilities."""
    parts = []
    for number, span in enumerate(packed.double().split(lengths)):
        places = torch.arange(len(span))
        near = (places[:, None] - places).abs() <= window
        query, key, value = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in span.chunk(3, 1))
        scores = (query / query.shape[-1] ** 0.5) @ key.transpose(1, 2)
        probabilities = scores.masked_fill(~near, -torch.inf).softmax(-1)
        if factors is not None:
            probabilities = probabilities * factors[number]
        parts.append((probabilities @ value).transpose(0, 1).flatten(1))
    return torch.cat(parts)


@pytest.mark.parametrize("size", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("window", WINDOWS)
def test_windowed_attention(size: int, window: int) -> None:
    packed = draws(sum(WINDOWED_LENGTHS), 3 * size * 2)
    ours = kernels.attention(packed, 2, starts(WINDOWED_LENGTHS), 0.0, window)
    compare(ours, windowed(packed, 2, WINDOWED_LENGTHS, window), [packed])


@pytest.mark.parametrize("size", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("probability", [0.0, 0.2])
def test_windowed_attention_in_bfloat16_is_that_in_float32_but_for_rounding(size: int, window: int, probability: float) -> None:
    low = draws(sum(WINDOWED_LENGTHS), 3 * size * 2).detach().bfloat16().requires_grad_()
    full = low.detach().float().requires_grad_()
    results = []
    for packed in (low, full):
        torch.manual_seed(3)  # the same elements dropped
        output = kernels.attention(packed, 2, starts(WINDOWED_LENGTHS), probability, window)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
        results.append((output.detach().float(), torch.autograd.grad(output, packed, weights)[0].float()))
    for one, other in zip(*results, strict=True):
        assert float((one - other).abs().max() / other.abs().max()) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_a_window_as_long_as_the_span_is_full_attention(dtype: torch.dtype, probability: float) -> None:
    lengths = [1, 40, 33, 100]
    packed = draws(sum(lengths), 96).detach().to(dtype).requires_grad_()
    results = []
    for window in (None, 99, 2**40):
        torch.manual_seed(3)
        output = kernels.attention(packed, 2, starts(lengths), probability, window)
        results.append((output, torch.autograd.grad(output, packed, torch.ones_like(output))[0]))
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("window", "lengths"), [(0, [40, 3]), (5, [70, 33]), (64, [150, 65])])
def test_windowed_attention_with_dropout(window: int, lengths: list[int]) -> None:
    """The mask, as equal keys and values that are the identity show it, explains values and gradients."""
    size = max(lengths)
    shown = torch.zeros(sum(lengths), 3 * size)
    shown[:, 2 * size :] = torch.cat([torch.eye(size)[:length] for length in lengths])
    torch.manual_seed(3)
    kept = kernels.attention(shown, 1, starts(lengths), 0.3, window)
    factors = [(part[:, :length] > 0) / (1 - 19661 / 65536) for part, length in zip(kept.split(lengths), lengths, strict=True)]
    packed = draws(sum(lengths), 3 * size)
    torch.manual_seed(3)
    ours = kernels.attention(packed, 1, starts(lengths), 0.3, window)
    compare(ours, windowed(packed, 1, lengths, window, factors), [packed])


def test_the_time_of_windowed_attention_is_proportional_to_the_length() -> None:
    """Four times the tokens take four times as long; with full attention they take sixteen times as long."""

    def seconds(length: int) -> float:
        packed = draws(length, 3 * 64).detach().bfloat16().requires_grad_()
        began = time.process_time()
        output = kernels.attention(packed, 1, starts([length]), 0.0, 64)
        torch.autograd.grad(output, packed, torch.ones_like(output))
        return time.process_time() - began

    for length in (2048, 8192):
        seconds(length)
    fastest = [min(seconds(length) for _ in range(5)) for length in (2048, 8192)]
    assert fastest[1] < 6 * fastest[0] + 0.005


def test_a_window_is_not_negative() -> None:
    with pytest.raises(ValueError, match="window is -1"):
        kernels.attention(torch.zeros(4, 48), 1, starts([4]), 0.0, -1)


def angles(positions: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embeddings with base 10,000."""
    turns = torch.outer(torch.arange(positions).float(), 10_000 ** (-torch.arange(0, size, 2) / size))
    return turns.cos(), turns.sin()


def turned(packed: Tensor, heads: int, cosine: Tensor, sine: Tensor, positions: Tensor) -> Tensor:
    """The rotation by torch, in double precision, as transformers writes it out."""
    parts = packed.double().unflatten(1, (3, heads, -1))
    queries_and_keys, values = parts[:, :2], parts[:, 2:]
    first, second = queries_and_keys.chunk(2, -1)
    both = [torch.cat([table, table], 1).double()[positions][:, None, None] for table in (cosine, sine)]
    rotated = queries_and_keys * both[0] + torch.cat([-second, first], -1) * both[1]
    return torch.cat([rotated, values], 1).flatten(1)


@pytest.mark.parametrize("size", [2, 8, 16, 24, 32, 64])
def test_rotary(size: int) -> None:
    packed, tables = draws(70, 3 * size * 3), angles(40, size)
    positions = torch.cat([torch.arange(40), torch.arange(30)])
    ours = kernels.rotary(packed, 3, *tables, positions)
    compare(ours, turned(packed, 3, *tables, positions), [packed])
    assert torch.equal(ours[:, 6 * size :], packed[:, 6 * size :])
    low = packed.detach().bfloat16()
    rounded = kernels.rotary(low, 3, *tables, positions)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded, turned(low, 3, *tables, positions).bfloat16(), atol=1e-6, rtol=8e-3)


def test_rotary_by_hand() -> None:
    """A quarter turn swaps the halves of queries and keys and negates one; position 0 changes nothing."""
    packed = torch.arange(1.0, 13.0).expand(2, 12)
    cosine, sine = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert kernels.rotary(packed, 1, cosine, sine, torch.tensor([1, 0])).tolist() == [
        [-3, -4, 1, 2, -7, -8, 5, 6, 9, 10, 11, 12],
        list(range(1, 13)),
    ]


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_outside_of_the_rotary_tables_is_refused(position: int) -> None:
    with pytest.raises(IndexError, match="rotary tables"):
        kernels.rotary(torch.zeros(2, 48), 1, *angles(5, 16), torch.tensor([0, position]))


def kept_by_attention(length: int, probability: float) -> Tensor:
    """Which probabilities a call keeps: equal keys, and values that are the identity, show the mask itself."""
    packed = torch.zeros(length, 3 * length)
    packed[:, 2 * length :] = torch.eye(length)
    return kernels.attention(packed, 1, starts([length]), probability) * length


MASKS: dict[str, Callable[[float], Tensor]] = {
    "dropout": lambda p: kernels.dropout(torch.ones(1000, 1003), p),
    "dropout in bfloat16": lambda p: kernels.dropout(torch.ones(1000, 1003).bfloat16(), p).float(),
    "attention": lambda p: torch.stack([kept_by_attention(512, p) for _ in range(4)]),
}


@pytest.mark.parametrize("probability", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("name", MASKS)
def test_the_probability_of_dropout(name: str, probability: float) -> None:
    """Within five standard errors over a million elements or more; the mean stays."""
    torch.manual_seed(0)
    masks = torch.cat([MASKS[name](probability).flatten() for _ in range(4)])
    error = (probability * (1 - probability) / masks.numel()) ** 0.5
    assert abs(float((masks == 0).float().mean()) - probability) < 5 * error
    tolerance = 0.004 if "bfloat16" in name else 1e-4
    kept = masks[masks > 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - probability)), atol=0, rtol=tolerance)


def test_dropped_elements_are_independent_of_their_neighbors_rows_columns_and_calls() -> None:
    torch.manual_seed(1)
    first, second = (kernels.dropout(torch.ones(512, 2048), 0.5) == 0 for _ in range(2))
    pairs = {
        "next column": (first[:, 1:], first[:, :-1]),
        "next row": (first[1:], first[:-1]),
        "16 columns on": (first[:, 16:], first[:, :-16]),
        "32 columns on": (first[:, 32:], first[:, :-32]),
        "next call": (first, second),
    }
    for name, (one, other) in pairs.items():
        agreement = float((one == other).double().mean())
        assert abs(agreement - 0.5) < 5 * 0.5 / one.numel() ** 0.5, name


@pytest.mark.parametrize("part", ["dropout", "norm", "add_norm", "attention"])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(part: str) -> None:
    """Each function is linear in what is dropped, or nearly: the gradient along a direction is the difference quotient."""
    norm = nn.LayerNorm(96).double()
    torch.manual_seed(0)
    nn.init.normal_(norm.weight)
    norm = norm.float()
    residual = draws(40, 96, seed=5).detach()

    def value(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        if part == "dropout":
            result = kernels.dropout(x, 0.3)
        elif part == "norm":
            result, _ = kernels.residual_norm(x, None, residual, norm, 0.3, want_low=False)
        elif part == "add_norm":
            result = torch.cat(kernels.add_norm(x, None, residual, norm, 0.3, want_low=False))
        else:
            result = kernels.attention(x, 2, starts([25, 15]), 0.3)
        return (result.double() * torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)).sum()

    x = draws(40, 96)
    gradient = torch.autograd.grad(value(x), x)[0].double()
    direction = draws(40, 96, seed=6).detach()
    step = 1e-2
    with torch.no_grad():
        quotient = (value(x + step * direction) - value(x - step * direction)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(quotient), rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_samples_are_distributed_as_the_softmax(dtype: torch.dtype, temperature: float) -> None:
    logits = draws(1, 600, scale=1.5).detach().to(dtype)
    count = 200_000
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(2))
    found = kernels.sample(logits.expand(count, -1), uniforms, temperature)
    expected = (logits.double() / temperature).softmax(-1)[0] * count
    seen = torch.bincount(found, minlength=600).double()
    common = expected > 5
    rest = torch.stack([seen[~common].sum(), expected[~common].sum()])
    table = torch.cat([torch.stack([seen[common], expected[common]]), rest[:, None]], 1)
    assert stats.chisquare(table[0], table[1] * table[0].sum() / table[1].sum()).pvalue > 1e-3


def test_samples_are_those_of_the_plain_path() -> None:
    """But for uniform numbers that fall within a rounding error of a boundary."""
    from discern.corruption.sampling import sample_tokens

    logits = draws(3000, 700, scale=2).detach()
    uniforms = torch.rand(3000, generator=torch.Generator().manual_seed(2))
    ours = sample_tokens(logits, uniforms)
    with kernels.switched_off():
        plain = sample_tokens(logits, uniforms)
    assert int((ours != plain).sum()) <= 3


def test_they_are_used_only_where_they_can_be() -> None:
    assert kernels.usable(torch.zeros(2), torch.zeros(2).bfloat16())
    assert not kernels.usable(torch.zeros(2).double())
    assert not kernels.usable(torch.zeros(2, device="meta"))
    with kernels.switched_off():
        assert not kernels.usable(torch.zeros(2))


def test_the_result_does_not_depend_on_the_seed_without_dropout() -> None:
    assert kernels.threshold(0.0) == 0
    assert kernels.threshold(0.1) == 6554
    state = torch.get_rng_state()
    kernels.attention(draws(4, 48).detach(), 1, starts([4]), 0.0)
    assert torch.equal(state, torch.get_rng_state())


def test_the_norm_of_gradients() -> None:
    tensors = [draws(*shape, seed=seed).detach() for seed, shape in enumerate([(1,), (7, 13), (300, 301), (0,)])]
    expected = float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())
    assert kernels.gradient_norm(tensors) == pytest.approx(expected, rel=1e-7)
    kernels.scale_gradients(tensors, 0.5)
    assert kernels.gradient_norm(tensors) == pytest.approx(expected / 2, rel=1e-7)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_the_optimizer_takes_the_same_steps_on_both_paths(bias_correction: bool) -> None:
    results = []
    for context in (nullcontext(), kernels.switched_off()):
        with context:
            parameters = [nn.Parameter(draws(*shape, seed=7).detach().clone()) for shape in [(5,), (33, 70), (200, 100)]]
            config = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, bias_correction=bias_correction)
            optimizer = Optimizer([{"params": parameters}], config)
            for step in range(20):
                for number, parameter in enumerate(parameters):
                    parameter.grad = draws(*parameter.shape, seed=100 * step + number).detach()
                norm = clip_gradients(parameters, 1.0)
                optimizer.step()
            results.append([*(parameter.detach() for parameter in parameters), norm])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    assert kernels.gradient_norm([torch.tensor([1.0, torch.nan])]) != kernels.gradient_norm([torch.tensor([1.0])])
    assert torch.tensor(kernels.gradient_norm([torch.tensor([1.0, torch.inf])])).isinf()


@pytest.mark.parametrize("target", [-100, -1, 40])
def test_a_target_that_is_no_column_is_refused(target: int) -> None:
    with pytest.raises(IndexError, match="valid column"):
        kernels.cross_entropy_sum(torch.zeros(3, 40), torch.tensor([1, target, 2]))


def test_targets_of_32_bits() -> None:
    logits, targets = draws(5, 40).detach(), torch.tensor([1, 2, 3, 4, 39])
    assert torch.equal(kernels.cross_entropy_sum(logits, targets.int()), kernels.cross_entropy_sum(logits, targets))


def test_parameters_must_be_float32_without_gaps() -> None:
    x = torch.zeros(2, 4)
    assert kernels.usable(x, parameters=[torch.zeros(4)])
    assert not kernels.usable(x, parameters=[torch.zeros(4).bfloat16()])
    assert not kernels.usable(x, parameters=[torch.zeros(8)[::2]])
    with torch.autocast("cpu", torch.float16):
        assert not kernels.usable(x)


def test_sums_over_many_rows_keep_their_digits() -> None:
    rows = 65_536
    x, bias = torch.zeros(rows, 8, requires_grad=True), torch.zeros(8, requires_grad=True)
    (gradient,) = torch.autograd.grad(kernels.bias_gelu(x, bias), bias, torch.full((rows, 8), 0.2))
    torch.testing.assert_close(gradient, torch.full((8,), rows * 0.1), atol=0, rtol=1e-6)
    norm = nn.LayerNorm(8)
    values, _ = kernels.residual_norm(draws(1, 8).expand(rows, 8).contiguous(), None, None, norm, 0.0, want_low=False)
    (shift,) = torch.autograd.grad(values, norm.bias, torch.full((rows, 8), 0.1))
    torch.testing.assert_close(shift, torch.full((8,), rows * 0.1), atol=0, rtol=1e-6)


def test_another_default_dtype_changes_nothing() -> None:
    logits, targets = draws(5, 40).detach(), torch.tensor([1, 2, 3, 4, 39])
    expected = kernels.cross_entropy_sum(logits, targets)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(kernels.cross_entropy_sum(logits, targets), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_optimizer_leaves_no_stale_graph() -> None:
    parameter = nn.Parameter(torch.ones(3))
    loss = (parameter * parameter).sum()
    parameter.grad = torch.ones(3)
    Optimizer([{"params": [parameter]}], OptimizerConfig()).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_gradients_have_no_norm() -> None:
    assert clip_gradients([nn.Parameter(torch.ones(3))], 1.0) == 0


def relative_case(rows: int, asked: int, keys: int, length: int, *, segmented: bool) -> dict[str, Tensor | None]:
    """Terms of scores of two heads, some keys hidden and, for the first query of each row, all of them."""
    random = torch.Generator().manual_seed(1)
    relation = torch.randint(0, 3 if segmented else 2, (rows, asked, keys), generator=random).to(torch.uint8)
    relation[:, 0] = 0
    return {
        "content": draws(2, rows, asked, keys, scale=2),
        "apart": draws(2, rows, asked, keys + length, seed=2, scale=2),
        "gain": draws(2, rows, asked, seed=3) if segmented else None,
        "relation": relation,
        "starts": torch.randint(0, length + 1, (rows, asked), generator=random),
    }


def plain_relative(case: dict[str, Tensor | None]) -> Tensor:
    """The same in double precision, straight from the definition."""
    content, apart, gain, relation, starts = case.values()
    assert content is not None
    assert apart is not None
    assert starts is not None
    keys = content.shape[-1]
    columns = (starts[..., None] + torch.arange(keys)).expand(content.shape[0], -1, -1, -1)
    scores = content.double() + apart.double().gather(-1, columns)
    if gain is not None:
        scores = scores + gain.double()[..., None] * (relation == 2)
    if relation is None:
        return scores.softmax(-1)
    return scores.masked_fill(relation == 0, -torch.inf).softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("segmented", [True, False])
@pytest.mark.parametrize(("rows", "asked", "keys", "length"), [(1, 1, 1, 1), (2, 5, 16, 7), (3, 4, 37, 20), (3, 50, 129, 64)])
def test_relative_softmax(rows: int, asked: int, keys: int, length: int, segmented: bool) -> None:
    case = relative_case(rows, asked, keys, length, segmented=segmented)
    ours = kernels.relative_softmax(**case, probability=0.0)  # type: ignore[arg-type]
    assert not ours[:, :, 0].any(), "who sees nothing gathers nothing"
    inputs = [value for value in case.values() if value is not None and value.requires_grad]
    compare(ours, plain_relative(case), inputs)


def test_relative_softmax_where_everything_is_seen() -> None:
    case = relative_case(2, 6, 21, 6, segmented=False) | {"relation": None}
    ours = kernels.relative_softmax(**case, probability=0.0)  # type: ignore[arg-type]
    compare(ours, plain_relative(case), [case["content"], case["apart"]])  # type: ignore[list-item]


def test_relative_softmax_in_bfloat16() -> None:
    case = relative_case(3, 9, 37, 9, segmented=True)
    low = {name: value.to(torch.bfloat16) if name in ("content", "apart") else value for name, value in case.items()}  # type: ignore[union-attr]
    ours = kernels.relative_softmax(**low, probability=0.0)  # type: ignore[arg-type]
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), plain_relative(low), atol=4e-3, rtol=0)


def test_relative_softmax_drops_the_same_forwards_and_backwards() -> None:
    """What is dropped has no gradient, and what is kept is as much more as keeps the mean."""
    case = relative_case(4, 16, 200, 16, segmented=False)
    plain = plain_relative(case).detach()
    torch.manual_seed(0)
    ours = kernels.relative_softmax(**case, probability=0.25)  # type: ignore[arg-type]
    kept = (ours != 0).double()
    share = float(kept[plain > 0].mean())
    assert share == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(ours.double(), plain * kept / 0.75, atol=1e-6, rtol=1e-4)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9))
    reference = plain_relative(case) * kept / 0.75
    inputs = [case["content"], case["apart"]]
    found = torch.autograd.grad((ours * weights).sum(), inputs)  # type: ignore[arg-type]
    wanted = torch.autograd.grad((reference * weights).sum(), inputs)  # type: ignore[arg-type]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
