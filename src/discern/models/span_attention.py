"""Attention among the real tokens of a batch on a GPU, without padding and without a mask, and where it can be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from discern.models.unpadding import Direction

_switched_off: ContextVar[bool] = ContextVar("span_attention_switched_off", default=False)
_WIDEST_HEAD = 256
_AMPERE = (8, 0)  # FlashAttention 2 needs its instructions


def attend_in_spans(
    query: Float[Tensor, "T H d"],
    key: Float[Tensor, "T H d"],
    value: Float[Tensor, "T H d"],
    offsets: Int[Tensor, "spans_and_1"],
    longest: int,
    window: int | None = None,
    direction: Direction = "both",
) -> Float[Tensor, "T H d"]:
    """Softmax attention within spans of concatenated tokens, in bfloat16 or float16 on a GPU.

    Memory is proportional to T, and time to the length of a span times the window.

    Args:
        offsets: start of each span, and the end of the last; int32.
        longest: at least the length of the longest span.
        window: largest distance, in tokens, at which a token sees another of its span; None: no limit.
        direction: whether a token sees what precedes it, what follows it, or both.
    """
    from torch.nn.attention import varlen  # takes seconds to import, and only a GPU needs it

    window_size = (-1, -1) if window is None else (window, window)
    if direction == "left-to-right":
        window_size = (window_size[0], 0)
    elif direction == "right-to-left":
        window_size = (0, longest if window is None else window)  # a limit that nothing reaches: only (-1, -1) is tested as none
    return varlen.varlen_attn(query, key, value, offsets, offsets, longest, longest, window_size=window_size)  # type: ignore[return-value]


@dataclass(frozen=True)
class AttentionPath:
    """How attention is computed on a GPU.

    Attributes:
        name: 'varlen': among the real tokens alone; 'sdpa': in padded rows, with a mask where tokens are hidden.
        reason: why not 'varlen'; "" if it is.
    """

    name: str
    reason: str = ""

    @property
    def note(self) -> str:
        """One line for the user."""
        if self.name == "varlen":
            return "attention runs among the real tokens alone, without a mask (torch's varlen_attn)"
        return f"attention runs in padded rows (torch's scaled_dot_product_attention), because {self.reason}"


def attention_path(model: nn.Module, device: torch.device, precision: str) -> AttentionPath | None:
    """How the encoders of a model compute attention on a GPU in its current mode; None on any other device.

    Args:
        model: its encoders are those among its modules.
        precision: 'float32' or 'bfloat16'.
    """
    if device.type != "cuda":
        return None
    reason = _obstacle(model, precision)
    if reason is None and torch.cuda.get_device_capability(device) < _AMPERE:
        reason = f"{torch.cuda.get_device_name(device)} is older than the first GPUs that it supports (Ampere)"
    return AttentionPath("varlen") if reason is None else AttentionPath("sdpa", reason)


@contextmanager
def switched_off() -> Iterator[None]:
    """A context in which padded rows are used everywhere, to compare the two."""
    token = _switched_off.set(True)
    try:
        yield
    finally:
        _switched_off.reset(token)


def _obstacle(model: nn.Module, precision: str) -> str | None:
    """Why the encoders of a model cannot attend to spans in this precision; None if they can."""
    from discern.models.attention import SelfAttention
    from discern.models.base import Encoder

    if _switched_off.get():
        return "it is switched off"
    if precision == "float32":
        return "the precision is float32 (train.precision)"
    unable = next((each.config.encoder for each in model.modules() if isinstance(each, Encoder) and not each.takes_spans), None)
    if unable is not None:
        return f"encoder '{unable}' cannot run without padding on a GPU"
    for part in model.modules():
        if not isinstance(part, SelfAttention):
            continue
        width = part.query.out_features // part.num_heads
        if part.dropout.active:
            return f"attention dropout is {part.dropout.active:g}; model.attention_dropout=0 is faster"
        if width % 8 or width > _WIDEST_HEAD:
            return f"heads of width {width} are not a multiple of 8 up to {_WIDEST_HEAD}"
    return None
