"""Fused operations for CPUs, compiled on first use; callers have a plain PyTorch path for machines without a C compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int, Int8, UInt8
from torch import Tensor
from torch.autograd.function import once_differentiable

from discern.kernels.build import load_kernels as load_kernels

_switched_off: ContextVar[bool] = ContextVar("kernels_switched_off", default=False)
_NAMES = {torch.float32: "float", torch.bfloat16: "half"}
_OUTSIDE = 2


def usable(*tensors: Tensor, parameters: Sequence[Tensor] = ()) -> bool:
    """Whether the kernels support these tensors: on the CPU, float32 or bfloat16, not under torch.compile, library loaded.

    Args:
        parameters: weights, biases and gains, which must be float32 and contiguous.
    """
    if torch.compiler.is_compiling() or _switched_off.get() or load_kernels().library is None:
        return False
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") not in _NAMES:
        return False
    if any(tensor.dtype != torch.float32 or not tensor.is_contiguous() for tensor in parameters):
        return False
    return all(tensor.device.type == "cpu" and tensor.dtype in _NAMES for tensor in (*tensors, *parameters))


@contextmanager
def switched_off(switch: ContextVar[bool] = _switched_off) -> Iterator[None]:
    """A context in which the plain path is used everywhere, to compare the two.

    Args:
        switch: of the path that is not used; by default that of the kernels.
    """
    token = switch.set(True)
    try:
        yield
    finally:
        switch.reset(token)


def threshold(probability: float) -> int:
    """The probability in units of 1/65536."""
    return min(round(probability * 65536), 65535)


def rows_of(x: Tensor) -> tuple[int, int]:
    columns = x.shape[-1]
    return x.numel() // max(columns, 1), columns


def dropping(probability: float) -> tuple[int, int]:
    """A new seed and the threshold for dropping elements with a probability."""
    return int(torch.randint(-(2**63), 2**63 - 1, (), device="cpu")) if probability else 0, threshold(probability)


def call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Run a kernel. Tensors are passed as pointers (None as null), integers as 64 bits, and floats as 32.

    Inputs that are not contiguous are copied; results have to be contiguous.
    """
    library = load_kernels().library
    assert library is not None
    held = [argument.contiguous() if isinstance(argument, Tensor) else argument for argument in arguments]
    code = getattr(library, f"{name}_{_NAMES[dtype]}")(*map(_converted, held))
    if code == _OUTSIDE:
        raise IndexError("a target is not a valid column index")
    if code:
        raise MemoryError(f"kernel '{name}' could not allocate its working memory")


def _converted(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument


def bias_gelu(x: Float[Tensor, "... F"], bias: Float[Tensor, "F"] | None) -> Float[Tensor, "... F"]:
    """GELU(x + bias), by the error function."""
    return _Gelu.apply("gelu", x, bias, x.shape[-1])  # type: ignore[no-any-return, no-untyped-call]


def geglu(x: Float[Tensor, "... two_F"], bias: Float[Tensor, "two_F"] | None = None) -> Float[Tensor, "... F"]:
    """GELU(left) * right, by the error function, of the two halves of x + bias.

    Reference: Shazeer 2020, "GLU variants improve transformer".
    """
    return _Gelu.apply("geglu", x, bias, x.shape[-1] // 2)  # type: ignore[no-any-return, no-untyped-call]


def dropout(x: Tensor, probability: float) -> Tensor:
    """Elements zeroed with a probability (a multiple of 1/65536), the rest scaled so that the mean is unchanged."""
    return _Dropout.apply(x, dropping(probability))  # type: ignore[no-any-return, no-untyped-call]


def residual_norm(
    part: Float[Tensor, "... D"],
    bias: Tensor | None,
    residual: Float[Tensor, "... D"] | None,
    norm: torch.nn.LayerNorm,
    probability: float,
    want_low: bool,
    keeps_sum: bool = False,
) -> tuple[Float[Tensor, "... D"], Float[Tensor, "... D"]]:
    """LayerNorm(residual + dropout(part + bias)) in float32, and with `want_low` also in bfloat16.

    Args:
        keeps_sum: return the sum in float32, and its LayerNorm: in bfloat16 with `want_low`, else in float32.
    """
    values, other = _Norm.apply(  # type: ignore[no-untyped-call]
        keeps_sum, part, bias, residual, norm.weight, norm.bias, norm.eps, dropping(probability), want_low
    )
    return values, values if other is None else other


def cross_entropy_sum(logits: Float[Tensor, "M V"], targets: Int[Tensor, "M"]) -> Float[Tensor, ""]:
    """Cross-entropy in float32, summed over the rows.

    Raises:
        IndexError: a target is not a valid column index.
    """
    return _CrossEntropy.apply(logits, targets)  # type: ignore[no-any-return, no-untyped-call]


def sample(logits: Float[Tensor, "M V"], uniforms: Float[Tensor, "M"], temperature: float) -> Int[Tensor, "M"]:
    """Sample one id per row from the softmax of logits / temperature, by inverting the cumulative distribution function."""
    ids = logits.new_empty(len(logits), dtype=torch.int64)
    call("sample", logits.dtype, logits, uniforms.float(), ids, *logits.shape, 1 / temperature)
    return ids


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, bias: Tensor | None, columns: int) -> Tensor:
        x = x.contiguous()
        result = x.new_empty(*x.shape[:-1], columns)
        call(name, x.dtype, x, bias, result, *rows_of(result))
        # The input alone: the backward pass computes the derivative again.
        ctx.save_for_backward(x, bias)
        ctx.name = name
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, dbias = torch.empty_like(x), _like(bias)
        call(f"{ctx.name}_back", x.dtype, x, bias, gradient, dx, dbias, *rows_of(gradient))
        return None, dx, dbias, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, drop: tuple[int, int]) -> Tensor:
        ctx.drop = drop
        return _dropped(x, drop)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _dropped(gradient, ctx.drop), None


def _dropped(x: Tensor, drop: tuple[int, int]) -> Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    call("dropout", x.dtype, x, result, *rows_of(x), *drop)
    return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        keeps_sum: bool,
        part: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        gain: Tensor,
        shift: Tensor | None,
        epsilon: float,
        drop: tuple[int, int],
        want_low: bool,
    ) -> tuple[Tensor, Tensor | None]:
        # In order: the sum, and its LayerNorm in float32 and in bfloat16.
        wanted = (torch.float32, torch.float32 if not (keeps_sum and want_low) else None, torch.bfloat16 if want_low else None)
        results = [None if dtype is None else torch.empty(part.shape, dtype=dtype) for dtype in wanted]
        rows, columns = rows_of(part)
        mean, deviation = (torch.empty(rows) for _ in range(2))
        call("norm", part.dtype, part, bias, residual, gain, shift, *results, mean, deviation, rows, columns, epsilon, *drop)
        ctx.save_for_backward(results[0], mean, deviation, gain)
        ctx.keeps_sum, ctx.want_low, ctx.dtype, ctx.drop = keeps_sum, want_low, part.dtype, drop
        ctx.needs = residual is not None, bias is not None, shift is not None
        ctx.set_materialize_grads(False)
        returned = [result for result in results[not keeps_sum :] if result is not None]
        return returned[0], returned[1] if len(returned) == 2 else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mean, deviation, gain = ctx.saved_tensors
        likes = (total, gain, gain)
        dresidual, dbias, dshift = (torch.empty_like(like) if need else None for like, need in zip(likes, ctx.needs, strict=True))
        dpart, dgain = torch.empty_like(total, dtype=ctx.dtype), torch.empty_like(gain)
        dsum, dvalues, dlow = (first, second, None) if ctx.keeps_sum else (None, first, second)
        if ctx.keeps_sum and ctx.want_low:
            dvalues, dlow = None, second
        results = (dresidual, dpart, dbias, dgain, dshift, *rows_of(total), *ctx.drop)
        call("norm_back", ctx.dtype, dsum, dvalues, dlow, total, mean, deviation, gain, *results)
        return None, dpart, dbias, dresidual, dgain, dshift, None, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = logits.contiguous(), targets.long()
        losses, normalizer = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
        call("entropy", logits.dtype, logits, targets, losses, normalizer, *logits.shape)
        ctx.save_for_backward(logits, targets, normalizer)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, targets, normalizer = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        call("entropy_back", logits.dtype, logits, targets, normalizer, gradient.float(), dlogits, *logits.shape)
        return dlogits, None


def gradient_norm(gradients: Sequence[Tensor]) -> float:
    """The joint Euclidean norm of tensors that are dense, float32 and on the CPU."""
    norm = ctypes.c_double()
    call("norm_of", torch.float32, _pointers(gradients), *_sizes(gradients), ctypes.byref(norm))
    return norm.value


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply the gradients by a factor, in place."""
    call("scale", torch.float32, _pointers(gradients), *_sizes(gradients), float(factor))
    torch.autograd.graph.increment_version(gradients)


def adamw(
    *lists: Sequence[Tensor],
    rate: float,
    kept: float,
    betas: tuple[float, float],
    root: float,
    epsilon: float,
) -> None:
    """One update in place, in a single pass over the parameters, gradients, means and squares.

    Args:
        lists: these four.
        rate: learning rate divided by the bias correction of the first moment.
        kept: factor of the parameters due to weight decay.
        root: square root of the bias correction of the second moment.
    """
    parameters, _, *moments = lists
    beta1, beta2 = betas
    numbers = map(float, (rate, kept, 1 - beta1, beta2, 1 - beta2, root, epsilon))
    call("adamw", torch.float32, *map(_pointers, lists), *_sizes(parameters), *numbers)
    torch.autograd.graph.increment_version(list(chain(parameters, *moments)))


def dense(tensors: Sequence[Tensor]) -> bool:
    """Whether the optimizer kernels support these tensors: ordinary contiguous float32 tensors on the CPU."""
    ordinary = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
    return len(tensors) > 0 and ordinary and usable(parameters=tensors)


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def _sizes(tensors: Sequence[Tensor]) -> tuple[Any, int]:
    """The number of elements of each, and the number of tensors."""
    return (ctypes.c_int64 * len(tensors))(*[tensor.numel() for tensor in tensors]), len(tensors)


def _like(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else torch.empty_like(bias)


def attention(
    packed: Float[Tensor, "T three_D"],
    num_heads: int,
    offsets: Int[Tensor, "spans_and_1"],
    probability: float,
    window: int | None = None,
    positions: Float[Tensor, "W two_D"] | None = None,
    buckets: Int[Tensor, "distances"] | None = None,
    scale: float | None = None,
    rotation: tuple[Float[Tensor, "T half"], Float[Tensor, "T half"]] | None = None,
    directions: Int8[Tensor, "spans"] | None = None,
) -> Float[Tensor, "T D"]:
    """Softmax attention within spans of concatenated tokens.

    Time and memory are proportional to the length of a span times the window. The same elements are dropped for any window.
    With positions, the products of query i with the first vector of the distance j - i, and of key j with the second, are added
    to the product of the two.

    Args:
        packed: queries, keys and values side by side.
        offsets: start of each span, and the end of the last; int64.
        probability: probability of dropping an attention probability.
        window: largest distance, in tokens, at which a token sees another of its span; None: no limit.
        positions: two vectors of each bucket of distances, side by side, with the heads of `packed`.
        buckets: row of `positions` for each distance from -n to n, in an order that never increases; n is at least the largest.
        scale: factor of the scores; None: 1 / sqrt(size of a head).
        rotation: cosines and sines of each token's angles, float32: the first half x1 of each query and key becomes
            x1 cos - x2 sin, and the second, x2, becomes x2 cos + x1 sin.
        directions: of each span: 1: a token sees itself and what precedes it, -1: and what follows it, 0: both; None: all 0.

    Reference: Vaswani et al. 2017; Dao et al. 2022 (FlashAttention); Su et al. 2021 (RoFormer) for the rotation.
    """
    scale = (packed.shape[1] / 3 / num_heads) ** -0.5 if scale is None else scale
    buckets = None if buckets is None else buckets.int()
    settings = num_heads, -1 if window is None else window, scale
    cosine, sine = rotation or (None, None)
    inputs = packed.contiguous(), offsets, directions, cosine, sine, positions, buckets
    return _Attention.apply(settings, dropping(probability), *inputs)  # type: ignore[no-any-return, no-untyped-call]


def relative_softmax(
    content: Float[Tensor, "H B Q K"],
    distance: Float[Tensor, "H B Q W"],
    gain: Float[Tensor, "H B Q"] | None,
    relation: UInt8[Tensor, "B Q K"] | None,
    starts: Int[Tensor, "B Q"],
    probability: float,
) -> Float[Tensor, "H B Q K"]:
    """Probabilities of relative attention, dropped out, from the terms of its scores; zeros for a query that sees no key.

    Args:
        content: term of the content.
        distance: term of the distance, for all distances; for key j of a query it is in column `starts + j`.
        gain: added for keys of another segment; None if there is only one segment.
        relation: relation of each key to each query, 0: hidden, 1: in the same segment, 2: in another; None: all are 1.
        starts: column of the first key of each query; int64.
        probability: probability of dropping an attention probability.
    """
    gain = None if gain is None else gain.float()
    return _RelativeSoftmax.apply(content, distance, gain, relation, starts, dropping(probability))  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: tuple[int, int, float],
        drop: tuple[int, int],
        *inputs: Any,
    ) -> Tensor:
        packed: Tensor = inputs[0]
        tokens, three = packed.shape
        result = packed.new_empty(tokens, three // 3)
        normalizer = packed.new_empty(tokens, settings[0], dtype=torch.float32)
        call("attend", packed.dtype, *_heads(inputs, *settings), result, normalizer, *drop)
        ctx.save_for_backward(*inputs, result, normalizer)
        ctx.settings, ctx.drop = settings, drop
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, result, normalizer = ctx.saved_tensors
        dpacked, dpositions = torch.empty_like(inputs[0]), _like(inputs[5])
        given = (*_heads(inputs, *ctx.settings), result, normalizer, gradient)
        call("attend_back", result.dtype, *given, *_thirds(dpacked), dpositions, *ctx.drop)
        return None, None, dpacked, None, None, None, None, dpositions, None


class _RelativeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        content: Tensor,
        distance: Tensor,
        gain: Tensor | None,
        relation: Tensor | None,
        starts: Tensor,
        drop: tuple[int, int],
    ) -> Tensor:
        probabilities = torch.empty(content.shape, dtype=content.dtype)
        dropped = torch.empty_like(probabilities) if drop[1] else probabilities
        sizes = (content.shape[:-1].numel(), starts.numel(), content.shape[-1], distance.shape[-1])
        call("relative", content.dtype, content, distance, gain, relation, starts, probabilities, dropped, *sizes, *drop)
        ctx.save_for_backward(probabilities, relation, starts)
        ctx.drop, ctx.sizes, ctx.has_gain = drop, sizes, gain is not None
        return dropped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, relation, starts = ctx.saved_tensors
        dcontent = torch.empty_like(probabilities)
        ddistance = probabilities.new_empty(*probabilities.shape[:-1], ctx.sizes[-1])
        dgain = probabilities.new_empty(probabilities.shape[:-1], dtype=torch.float32) if ctx.has_gain else None
        given = (probabilities, gradient, relation, starts, dcontent, ddistance, dgain)
        call("relative_back", probabilities.dtype, *given, *ctx.sizes, *ctx.drop)
        return dcontent, ddistance, dgain, None, None, None


def _thirds(packed: Tensor) -> list[ctypes.c_void_p]:
    """Pointers to the queries, keys and values of the first row."""
    step = packed.shape[1] // 3 * packed.element_size()
    return [ctypes.c_void_p(packed.data_ptr() + part * step) for part in range(3)]


def _heads(inputs: Sequence[Any], num_heads: int, window: int, scale: float) -> list[Any]:
    """Arguments that describe the layout of heads and spans."""
    packed, offsets, directions, cosine, sine, positions, buckets = inputs
    three = packed.shape[1]
    layout = [three, three // 3 // num_heads, num_heads, offsets, directions, len(offsets) - 1, window, scale, cosine, sine]
    rows, reach = (0, 0) if positions is None else (len(positions), (len(buckets) + 1) // 2)
    return [*_thirds(packed), *layout, positions, buckets, rows, reach]
