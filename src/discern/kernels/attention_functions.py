"""Attention's kernels as differentiable functions of tensors. Callers ask `usable` first."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.autograd.function import once_differentiable

from discern.kernels.functions import call, draw_seed, threshold


def attention(
    packed: Float[Tensor, "T three_D"],
    num_heads: int,
    offsets: Int[Tensor, "spans_and_1"],
    probability: float,
    window: int | None = None,
) -> Float[Tensor, "T D"]:
    """Softmax attention within spans of concatenated tokens.

    Time and memory are proportional to the length of a span times the window. The same elements are dropped for any window.

    Args:
        packed: queries, keys and values side by side.
        offsets: start of each span, and the end of the last; int64.
        probability: probability of dropping an attention probability.
        window: largest distance, in tokens, at which a token sees another of its span; None: no limit.
    """
    if window is not None and window < 0:
        raise ValueError(f"the window is {window}; it must be 0 or more tokens to either side")
    seed = draw_seed() if probability else 0
    return _Attention.apply(packed, num_heads, offsets, seed, threshold(probability), window)  # type: ignore[no-any-return, no-untyped-call]


def rotary(
    packed: Float[Tensor, "T three_D"],
    num_heads: int,
    cosine: Float[Tensor, "P half_d"],
    sine: Float[Tensor, "P half_d"],
    positions: Int[Tensor, "T"],
) -> Float[Tensor, "T three_D"]:
    """Rotary position embeddings: queries and keys rotated by the angles of their positions; values unchanged.

    The first half of a head, x1, becomes x1 cos - x2 sin, and the second, x2, becomes x2 cos + x1 sin.

    Args:
        packed: queries, keys and values side by side, with heads of an even width.
        cosine: cosines of the angles at each position, float32.
        sine: sines of the same.
        positions: row of the tables for each token.

    Raises:
        IndexError: a position is outside of the tables.

    Reference: Su et al. 2021, "RoFormer: enhanced transformer with rotary position embedding".
    """
    return _Rotary.apply(packed, num_heads, cosine, sine, positions)  # type: ignore[no-any-return, no-untyped-call]


def relative_softmax(
    content: Float[Tensor, "H B Q K"],
    apart: Float[Tensor, "H B Q W"],
    gain: Float[Tensor, "H B Q"] | None,
    relation: UInt8[Tensor, "B Q K"] | None,
    starts: Int[Tensor, "B Q"],
    probability: float,
) -> Float[Tensor, "H B Q K"]:
    """Probabilities of relative attention, dropped out, from the terms of its scores; zeros for a query that sees no key.

    Args:
        content: term of the content.
        apart: term of the distance, for all distances; for key j of a query it is in column `starts + j`.
        gain: added for keys of another segment; None if there is only one segment.
        relation: relation of each key to each query, 0: hidden, 1: in the same segment, 2: in another; None: all are 1.
        starts: column of the first key of each query; int64.
        probability: probability of dropping an attention probability.
    """
    seed = draw_seed() if probability else 0
    gain = None if gain is None else gain.float()
    return _RelativeSoftmax.apply(content, apart, gain, relation, starts, seed, threshold(probability))  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, num_heads: int, offsets: Tensor, seed: int, limit: int, window: int | None) -> Tensor:
        packed = packed.contiguous()
        tokens, three = packed.shape
        result = packed.new_empty(tokens, three // 3)
        normalizer = packed.new_empty(tokens, num_heads, dtype=torch.float32)
        call("attend", packed.dtype, *_heads(packed, num_heads, offsets, window), result, normalizer, seed, limit)
        ctx.save_for_backward(packed, offsets, result, normalizer)
        ctx.num_heads, ctx.window, ctx.seed, ctx.limit = num_heads, window, seed, limit
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        packed, offsets, result, normalizer = ctx.saved_tensors
        dpacked = torch.empty_like(packed)
        given = (*_heads(packed, ctx.num_heads, offsets, ctx.window), result, normalizer, gradient.contiguous())
        call("attend_back", packed.dtype, *given, *_thirds(dpacked), ctx.seed, ctx.limit)
        return dpacked, None, None, None, None, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, num_heads: int, cosine: Tensor, sine: Tensor, positions: Tensor) -> Tensor:
        tables = (cosine.float().contiguous(), sine.float().contiguous(), positions.long().contiguous())
        ctx.save_for_backward(*tables)
        ctx.num_heads = num_heads
        return _rotated(packed, num_heads, tables, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _rotated(gradient, ctx.num_heads, ctx.saved_tensors, -1.0), None, None, None, None


def _rotated(packed: Tensor, num_heads: int, tables: Sequence[Tensor], sign: float) -> Tensor:
    # A new tensor: rotating in place would save less than a hundredth of a layer's time, and change the tensor of the caller.
    packed = packed.contiguous()
    cosine, sine, positions = tables
    result = torch.empty_like(packed)
    rows, three = packed.shape
    layout = (rows, three, 2 * num_heads, three // 3 // num_heads)
    call("rotary", packed.dtype, packed, result, *layout, cosine, sine, positions, len(cosine), ctypes.c_float(sign))
    return result


class _RelativeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        content: Tensor,
        apart: Tensor,
        gain: Tensor | None,
        relation: Tensor | None,
        starts: Tensor,
        seed: int,
        limit: int,
    ) -> Tensor:
        content, apart, starts = content.contiguous(), apart.contiguous(), starts.contiguous()
        gain = None if gain is None else gain.contiguous()
        relation = None if relation is None else relation.contiguous()
        probabilities = torch.empty_like(content)
        dropped = torch.empty_like(content) if limit else probabilities
        sizes = (content.shape[:-1].numel(), starts.numel(), content.shape[-1], apart.shape[-1])
        call("relative", content.dtype, content, apart, gain, relation, starts, probabilities, dropped, *sizes, seed, limit)
        ctx.save_for_backward(probabilities, relation, starts)
        ctx.seed, ctx.limit, ctx.sizes, ctx.has_gain = seed, limit, sizes, gain is not None
        return dropped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, relation, starts = ctx.saved_tensors
        dcontent = torch.empty_like(probabilities)
        dapart = probabilities.new_empty(*probabilities.shape[:-1], ctx.sizes[-1])
        dgain = probabilities.new_empty(probabilities.shape[:-1], dtype=torch.float32) if ctx.has_gain else None
        given = (probabilities, gradient.contiguous(), relation, starts, dcontent, dapart, dgain)
        call("relative_back", probabilities.dtype, *given, *ctx.sizes, ctx.seed, ctx.limit)
        return dcontent, dapart, dgain, None, None, None, None


def _thirds(packed: Tensor) -> list[ctypes.c_void_p]:
    """Pointers to the queries, keys and values of the first row."""
    step = packed.shape[1] // 3 * packed.element_size()
    return [ctypes.c_void_p(packed.data_ptr() + part * step) for part in range(3)]


def _heads(packed: Tensor, num_heads: int, offsets: Tensor, window: int | None) -> list[Any]:
    """Arguments that describe the layout of heads and spans."""
    three = packed.shape[1]
    layout = [three, three // 3 // num_heads, num_heads, offsets, len(offsets) - 1]
    return [*_thirds(packed), *layout, -1 if window is None else window]
