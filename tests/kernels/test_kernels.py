"""Every kernel against torch in double precision, and what cannot be compared by what it must be."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from discern import kernels
from discern.corruption.masking import sample_tokens
from discern.training.config import OptimizerConfig
from discern.training.optimizer import Optimizer, clip_gradients
from tests.paths import on_path


@pytest.fixture(autouse=True)
def _kernels() -> None:
    next(on_path("kernels"))


def draws(*shape: int, seed: int = 0, scale: float = 1.0, low: bool = False) -> nn.Parameter:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return nn.Parameter(values.bfloat16() if low else values)


def compare(ours: Tensor, reference: Tensor, inputs: Sequence[Tensor], tolerance: float = 1e-6) -> None:
    """Values, and the gradients of a random weighted sum, relative to their largest."""
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9))
    pairs = [
        (result.detach(), *torch.autograd.grad((result.float() * weights).sum(), inputs, retain_graph=True))
        for result in (ours, reference)
    ]
    for number, (actual, expected) in enumerate(zip(*pairs, strict=True)):
        scale = max(float(expected.abs().max()), 1.0)
        assert float((actual.double() - expected).abs().max()) <= tolerance * scale, f"number {number} of value and gradients"


def layer_norm(gain: nn.Parameter, shift: nn.Parameter | None) -> nn.LayerNorm:
    norm = nn.LayerNorm(len(gain))
    norm.weight, norm.bias = gain, shift  # type: ignore[assignment]
    return norm


def double_norm(x: Tensor, gain: Tensor, shift: Tensor | None) -> Tensor:
    return F.layer_norm(x, gain.shape, gain, shift, 1e-5)


def double_geglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    left, right = (x if bias is None else x + bias).chunk(2, -1)
    return F.gelu(left) * right


def residual_norm(part: Any, bias: Any, residual: Any, *norm: Any) -> Tensor:
    """Both results, as both gradients count: that in float32, and its rounding."""
    low = part.dtype == torch.bfloat16
    values, rounded = kernels.residual_norm(part, bias, residual, layer_norm(*norm), 0.0, want_low=low)
    assert torch.equal(rounded, values.to(part.dtype))
    return torch.cat([values, rounded.float()])


def add_norm(part: Any, bias: Any, residual: Any, *norm: Any) -> Tensor:
    low = part.dtype == torch.bfloat16
    total, normalized = kernels.residual_norm(part, bias, residual, layer_norm(*norm), 0.0, low, keeps_sum=True)
    assert normalized.dtype == part.dtype
    return torch.cat([total, normalized.float()])


def double_residual_norm(part: Any, bias: Any, residual: Any, *norm: Any) -> Tensor:
    total = part + (0 if bias is None else bias) + (0 if residual is None else residual)
    return torch.cat([double_norm(total, *norm)] * 2)


def double_add_norm(part: Any, bias: Any, residual: Any, *norm: Any) -> Tensor:
    total = residual + part + (0 if bias is None else bias)
    return torch.cat([total, double_norm(total, *norm)])


OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], str]] = {
    "gelu": (kernels.bias_gelu, lambda x, bias: F.gelu(x if bias is None else x + bias), "xc x-"),
    "geglu": (kernels.geglu, double_geglu, "wd w-"),
    "residual_norm": (residual_norm, double_residual_norm, "xcrcc x-rc- x--cc"),
    "add_norm": (add_norm, double_add_norm, "xcrcc x-rc-"),
}
"""Kernel, definition and, for each combination of arguments, their kinds: x and w (twice as wide) in either precision."""

CASES = [(name, arguments) for name, (*_, combinations) in OPERATIONS.items() for arguments in combinations.split()]


# Odd widths run through the tails of the 16 lanes, the large one through several threads.
@pytest.mark.parametrize("shape", [(1, 2), (3, 16), (7, 37), (70, 257)])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_operations_between_matrix_products(name: str, arguments: str, low: bool, shape: tuple[int, int]) -> None:
    rows, columns = shape
    sizes = {"x": shape, "w": (rows, 2 * columns), "r": shape, "c": (columns,), "d": (2 * columns,)}
    inputs = [
        draws(*sizes[kind], seed=number, scale=2, low=low and kind in "xw") if kind in sizes else None
        for number, kind in enumerate(arguments)
    ]
    ours, definition, _ = OPERATIONS[name]
    reference = definition(*[tensor if tensor is None else tensor.double() for tensor in inputs])
    compare(ours(*inputs), reference, [tensor for tensor in inputs if tensor is not None], 0.02 if low else 2e-6)


@pytest.mark.parametrize("columns", [2, 37, 5003])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_cross_entropy(columns: int, kind: torch.dtype) -> None:
    logits = draws(40, columns, scale=4)
    targets = torch.randint(0, columns, (40,), generator=torch.Generator().manual_seed(1))
    reference = F.cross_entropy(logits.double(), targets, reduction="sum")
    compare(kernels.cross_entropy_sum(logits, targets.to(kind)), reference, [logits])


def test_what_is_not_finite_stays_so() -> None:
    logits, norm = torch.zeros(3, 40), nn.LayerNorm(40)
    logits[1, 7] = torch.nan
    assert kernels.cross_entropy_sum(logits, torch.tensor([1, 2, 3])).isnan()
    assert kernels.bias_gelu(logits, torch.zeros(40)).isnan().sum() == 1
    assert kernels.geglu(logits).isnan().sum() == 1
    assert kernels.residual_norm(logits, None, None, norm, 0.0, want_low=True)[1][1].isnan().all()
    assert kernels.residual_norm(logits, None, torch.zeros(3, 40), norm, 0.0, want_low=True, keeps_sum=True)[1][1].isnan().all()
    assert kernels.gradient_norm([logits]) != kernels.gradient_norm([torch.zeros(3)])
    assert torch.tensor(kernels.gradient_norm([torch.tensor([1.0, torch.inf])])).isinf()


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def double_attention(
    packed: Tensor,
    heads: int,
    lengths: list[int],
    window: int | None,
    factors: list[Tensor] | None = None,
    positions: Tensor | None = None,
    buckets: Tensor | None = None,
    directions: Tensor | None = None,
) -> Tensor:
    """Attention of each span within a window, by its definition; `factors` multiply the probabilities."""
    parts = []
    for number, span in enumerate(packed.double().split(lengths)):
        distance = torch.arange(len(span)) - torch.arange(len(span))[:, None]  # key minus query
        far = distance.abs() > (len(span) if window is None else window)
        if directions is not None:
            far |= distance * directions[number] > 0
        query, key, value = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in span.chunk(3, 1))
        scores = query @ key.transpose(1, 2)
        if positions is not None and buckets is not None:
            of_query, of_key = positions.double()[buckets[distance + len(buckets) // 2]].unflatten(2, (2, heads, -1)).unbind(2)
            scores = scores + torch.einsum("hqd,qkhd->hqk", query, of_query) + torch.einsum("hkd,qkhd->hqk", key, of_key)
        scores = scores / query.shape[-1] ** 0.5
        probabilities = scores.masked_fill(far, -torch.inf).softmax(-1) * (1 if factors is None else factors[number])
        parts.append((probabilities @ value).transpose(0, 1).flatten(1))
    return torch.cat(parts)


# Spans around the windows, and around the borders of tiles of 32 queries.
LENGTHS = [1, 2, 3, 5, 31, 32, 33, 64, 65, 129, 200]


# Left to right, right to left, and both, for spans of the same lengths
DIRECTED, DIRECTIONS = [*LENGTHS, *LENGTHS, 65], torch.tensor([1] * 11 + [-1] * 11 + [0], dtype=torch.int8)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("window", [None, 0, 5, 64, 2**40])
@pytest.mark.parametrize(("size", "heads"), [(1, 1), (16, 2), (20, 3), (64, 1)])
def test_attention(size: int, heads: int, window: int | None, low: bool) -> None:
    packed = draws(sum(LENGTHS), 3 * size * heads, low=low)
    ours = kernels.attention(packed, heads, offsets(LENGTHS), 0.0, window)
    assert ours.dtype == packed.dtype
    compare(ours, double_attention(packed, heads, LENGTHS, window), [packed], 0.02 if low else 2e-6)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("window", [None, 5, 64])
def test_attention_in_one_direction(window: int | None, low: bool) -> None:
    packed = draws(sum(DIRECTED), 3 * 20 * 3, low=low)
    ours = kernels.attention(packed, 3, offsets(DIRECTED), 0.0, window, directions=DIRECTIONS)
    reference = double_attention(packed, 3, DIRECTED, window, directions=DIRECTIONS)
    compare(ours, reference, [packed], 0.02 if low else 2e-6)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(
    ("size", "heads", "nearest", "window"), [(1, 2, 3, None), (16, 2, 40, None), (20, 3, 7, 64), (64, 1, 500, None)]
)
def test_attention_with_positions(size: int, heads: int, nearest: int, window: int | None, low: bool) -> None:
    """Distances of up to `nearest` have vectors of their own; longer ones share some."""
    distance = torch.arange(-210, 211)
    longer = distance.sign() * (nearest + (distance.abs() - nearest).clamp(min=0) // 30)
    buckets = -torch.where(distance.abs() <= nearest, distance, longer)
    buckets = buckets - buckets.min()
    packed = draws(sum(DIRECTED), 3 * size * heads, low=low)
    positions = draws(int(buckets.max()) + 1, 2 * size * heads, seed=1, low=low)
    ours = kernels.attention(packed, heads, offsets(DIRECTED), 0.0, window, positions, buckets, directions=DIRECTIONS)
    reference = double_attention(packed, heads, DIRECTED, window, None, positions, buckets, DIRECTIONS)
    compare(ours, reference, [packed, positions], 0.02 if low else 3e-6)


def kept_by_attention(lengths: list[int], probability: float, window: int | None = None) -> list[Tensor]:
    """What a call keeps of each span's probabilities: equal keys, and values that are the identity, show it."""
    size = max(lengths)
    packed = torch.zeros(sum(lengths), 3 * size)
    packed[:, 2 * size :] = torch.cat([torch.eye(size)[:length] for length in lengths])
    output = kernels.attention(packed, 1, offsets(lengths), probability, window)
    return [part[:, :length] for part, length in zip(output.split(lengths), lengths, strict=True)]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("window", "lengths"), [(None, [25, 70]), (5, [70, 33]), (64, [150, 65])])
def test_attention_with_dropout(window: int | None, lengths: list[int], low: bool) -> None:
    """The mask explains values and gradients; it is the same for any precision."""
    torch.manual_seed(3)
    factors = [(part > 0) / (1 - 19661 / 65536) for part in kept_by_attention(lengths, 0.3, window)]
    packed = draws(sum(lengths), 3 * max(lengths), low=low)
    torch.manual_seed(3)
    ours = kernels.attention(packed, 1, offsets(lengths), 0.3, window)
    compare(ours, double_attention(packed, 1, lengths, window, factors), [packed], 0.02 if low else 2e-6)


def test_the_time_of_windowed_attention_is_proportional_to_the_length() -> None:
    """Four times the tokens take four times as long; with full attention they take sixteen times as long."""

    def seconds(length: int) -> float:
        packed = draws(length, 3 * 64, low=True)
        began = time.process_time()
        kernels.attention(packed, 1, offsets([length]), 0.0, 64).sum().backward()
        return time.process_time() - began

    fastest = [min(seconds(length) for _ in range(5)) for length in (2048, 8192)]
    assert fastest[1] < 6 * fastest[0] + 0.005


def angles(positions: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embeddings with base 10,000."""
    turns = torch.outer(torch.arange(positions).float(), 10_000 ** (-torch.arange(0, size, 2) / size))
    return turns.cos(), turns.sin()


def rotated(packed: Tensor, heads: int, cosine: Tensor, sine: Tensor, positions: Tensor) -> Tensor:
    """The rotation in double precision, as transformers writes it out."""
    parts = packed.double().unflatten(1, (3, heads, -1))
    queries_and_keys, values = parts[:, :2], parts[:, 2:]
    first, second = queries_and_keys.chunk(2, -1)
    both = [torch.cat([table, table], 1).double()[positions][:, None, None] for table in (cosine, sine)]
    turned = queries_and_keys * both[0] + torch.cat([-second, first], -1) * both[1]
    return torch.cat([turned, values], 1).flatten(1)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("size", [2, 24, 64])
def test_attention_with_rotation(size: int, low: bool) -> None:
    lengths, positions = [40, 30], torch.cat([torch.arange(40), torch.arange(30)])
    packed, tables = draws(70, 3 * size * 3, low=low), angles(40, size)
    ours = kernels.attention(packed, 3, offsets(lengths), 0.0, rotation=tuple(table[positions] for table in tables))
    reference = double_attention(rotated(packed, 3, *tables, positions), 3, lengths, None)
    compare(ours, reference, [packed], 0.02 if low else 2e-6)


def test_rotation_by_hand() -> None:
    """A quarter turn of the second token alone takes its query and key from (1, 0) to (0, 1): each token sees itself."""
    packed = torch.tensor([[30.0, 0, 1, 0, 1, 0], [30.0, 0, 1, 0, 0, 1]])
    rotation = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    values = kernels.attention(packed, 1, offsets([2]), 0.0, scale=1.0, rotation=rotation)
    torch.testing.assert_close(values, torch.eye(2))
    assert kernels.attention(packed, 1, offsets([2]), 0.0, scale=1.0).tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("value", [-1, 40])
def test_what_lies_outside_is_refused(value: int) -> None:
    with pytest.raises(IndexError, match="valid column"):
        kernels.cross_entropy_sum(torch.zeros(3, 40), torch.tensor([1, value, 2]))


MASKS: dict[str, Callable[[float], Tensor]] = {
    "dropout": lambda p: kernels.dropout(torch.ones(1000, 1003), p),
    "dropout in bfloat16": lambda p: kernels.dropout(torch.ones(1000, 1003).bfloat16(), p).float(),
    "attention": lambda p: torch.stack([kept_by_attention([512], p)[0] * 512 for _ in range(4)]),
}


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("name", MASKS)
def test_the_probability_of_dropout(name: str, probability: float) -> None:
    """Within five standard errors over a million elements or more; the mean stays."""
    torch.manual_seed(0)
    mask = MASKS[name](probability)
    error = (probability * (1 - probability) / mask.numel()) ** 0.5
    assert abs(float((mask == 0).float().mean()) - probability) < 5 * error
    remaining = mask[mask > 0]
    tolerance = 0.004 if "bfloat16" in name else 1e-4
    torch.testing.assert_close(remaining, torch.full_like(remaining, 1 / (1 - probability)), atol=0, rtol=tolerance)


def test_dropped_elements_are_independent_of_their_neighbors_rows_columns_and_calls() -> None:
    torch.manual_seed(1)
    first, second = (kernels.dropout(torch.ones(512, 2048), 0.5) == 0 for _ in range(2))
    pairs = {
        "next column": (first[:, 1:], first[:, :-1]),
        "next row": (first[1:], first[:-1]),
        "16 columns on": (first[:, 16:], first[:, :-16]),
        "next call": (first, second),
    }
    for name, (one, other) in pairs.items():
        agreement = float((one == other).double().mean())
        assert abs(agreement - 0.5) < 5 * 0.5 / one.numel() ** 0.5, name


DROPPING: dict[str, Callable[[Tensor, Tensor, nn.LayerNorm], Tensor]] = {
    "dropout": lambda x, residual, norm: kernels.dropout(x, 0.3),
    "norm": lambda x, residual, norm: kernels.residual_norm(x, None, residual, norm, 0.3, want_low=False)[0],
    "add_norm": lambda x, residual, norm: torch.cat(kernels.residual_norm(x, None, residual, norm, 0.3, False, True)),
}


@pytest.mark.parametrize("name", DROPPING)
def test_the_backward_pass_drops_what_the_forward_pass_dropped(name: str) -> None:
    """Each function is linear in what is dropped, or nearly: the gradient along a direction is the difference quotient."""
    norm, residual = layer_norm(draws(96, seed=3), draws(96, seed=4)), draws(40, 96, seed=5).detach()

    def value(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        result = DROPPING[name](x, residual, norm).double()
        return (result * torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)).sum()

    x, step = draws(40, 96), 0.01 * draws(40, 96, seed=6).detach()
    gradient = torch.autograd.grad(value(x), x)[0].double()
    with torch.no_grad():
        difference = value(x + step) - value(x - step)
    assert float((gradient * 2 * step).sum()) == pytest.approx(float(difference), rel=2e-3)


def test_without_dropout_no_random_number_is_drawn() -> None:
    assert [kernels.threshold(probability) for probability in (0.0, 0.1)] == [0, 6554]
    state = torch.get_rng_state()
    kept_by_attention([4], 0.0)
    assert torch.equal(state, torch.get_rng_state())


def test_samples_are_those_of_the_plain_path() -> None:
    """But for uniform numbers that fall within a rounding error of a boundary."""
    logits = draws(3000, 700, scale=2).detach()
    uniforms = torch.rand(3000, generator=torch.Generator().manual_seed(2))
    ours = sample_tokens(logits, uniforms)
    with kernels.switched_off():
        plain = sample_tokens(logits, uniforms)
    assert int((ours != plain).sum()) <= 3


def test_they_are_used_only_where_they_can_be() -> None:
    x = torch.zeros(2, 4)
    assert kernels.usable(x, x.bfloat16(), parameters=[torch.zeros(4)])
    assert not kernels.usable(x.double())
    assert not kernels.usable(torch.zeros(2, device="meta"))
    for unfit in (torch.zeros(4).bfloat16(), torch.zeros(8)[::2]):
        assert not kernels.usable(x, parameters=[unfit])
    for context in (kernels.switched_off(), torch.autocast("cpu", torch.float16)):
        with context:
            assert not kernels.usable(x)


def test_the_norm_of_gradients() -> None:
    tensors = [draws(*shape, seed=seed).detach() for seed, shape in enumerate([(1,), (7, 13), (300, 301), (0,)])]
    expected = float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())
    assert kernels.gradient_norm(tensors) == pytest.approx(expected, rel=1e-7)
    kernels.scale_gradients(tensors, 0.5)
    assert kernels.gradient_norm(tensors) == pytest.approx(expected / 2, rel=1e-7)
    assert clip_gradients([draws(3)], 1.0) == 0, "no gradients"


@pytest.mark.parametrize("bias_correction", [True, False])
def test_the_optimizer_takes_the_same_steps_on_both_paths(bias_correction: bool) -> None:
    results = []
    for context in (nullcontext(), kernels.switched_off()):
        with context:
            parameters = [draws(*shape, seed=7) for shape in [(5,), (33, 70), (200, 100)]]
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


def test_sums_over_many_rows_keep_their_digits() -> None:
    rows, norm = 65_536, nn.LayerNorm(8)
    x, bias = torch.zeros(rows, 8), torch.zeros(8, requires_grad=True)
    (gradient,) = torch.autograd.grad(kernels.bias_gelu(x, bias), bias, torch.full((rows, 8), 0.2))
    values, _ = kernels.residual_norm(draws(1, 8).expand(rows, 8).contiguous(), None, None, norm, 0.0, want_low=False)
    (shift,) = torch.autograd.grad(values, norm.bias, torch.full((rows, 8), 0.1))
    for total in (gradient, shift):
        torch.testing.assert_close(total, torch.full((8,), rows * 0.1), atol=0, rtol=1e-6)


def relative_case(rows: int, queries: int, keys: int, length: int, *, segments: int, low: bool = False) -> dict[str, Any]:
    """Terms of scores of two heads, some keys hidden and, for the first query of each row, all of them."""
    random = torch.Generator().manual_seed(1)
    relation = torch.randint(0, segments + 1, (rows, queries, keys), generator=random).to(torch.uint8)
    relation[:, 0] = 0
    return {
        "content": draws(2, rows, queries, keys, scale=2, low=low),
        "distance": draws(2, rows, queries, keys + length, seed=2, scale=2, low=low),
        "gain": draws(2, rows, queries, seed=3) if segments == 2 else None,
        "relation": relation if segments else None,
        "starts": torch.randint(0, length + 1, (rows, queries), generator=random),
    }


def double_relative(content: Tensor, distance: Tensor, gain: Tensor | None, relation: Tensor | None, starts: Tensor) -> Tensor:
    """The same in double precision, straight from the definition."""
    columns = (starts[..., None] + torch.arange(content.shape[-1])).expand(content.shape[0], -1, -1, -1)
    scores = content.double() + distance.double().gather(-1, columns)
    if gain is not None:
        scores = scores + gain.double()[..., None] * (relation == 2)
    if relation is None:
        return scores.softmax(-1)
    return scores.masked_fill(relation == 0, -torch.inf).softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("segments", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 4, 37, 20), (3, 50, 129, 64)])
def test_relative_softmax(sizes: tuple[int, int, int, int], segments: int, low: bool) -> None:
    """With no segment, everything is seen."""
    case = relative_case(*sizes, segments=segments, low=low)
    ours = kernels.relative_softmax(**case, probability=0.0)
    assert ours.dtype == case["content"].dtype
    assert segments == 0 or not ours[:, :, 0].any(), "who sees nothing gathers nothing"
    inputs = [case[name] for name in ("content", "distance", "gain") if case[name] is not None]
    compare(ours, double_relative(**case), inputs, 0.02 if low else 1e-6)


def test_relative_softmax_drops_the_same_forwards_and_backwards() -> None:
    """What is dropped has no gradient, and the rest is as much more as keeps the mean."""
    case = relative_case(4, 16, 200, 16, segments=1)
    definition = double_relative(**case)
    torch.manual_seed(0)
    ours = kernels.relative_softmax(**case, probability=0.25)
    remains = (ours != 0).double()
    assert float(remains[definition > 0].mean()) == pytest.approx(0.75, abs=0.01)
    compare(ours, definition * remains / 0.75, [case["content"], case["distance"]], 1e-5)
