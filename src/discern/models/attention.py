"""Multi-head self-attention, the block around it, and which tokens it sees: in padded rows, or among real tokens alone."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor, nn
from torch.nn import functional as F

from discern import kernels
from discern.models.config import ModelConfig
from discern.models.layers import Dropout, States, SumOfParts, linear_activation, linear_residual_norm, parts_flops
from discern.models.rotary import Rotation
from discern.types import Spans, find_spans

SPANS_OFF: ContextVar[bool] = ContextVar("span_attention_switched_off", default=False)
"""Whether padded rows are used everywhere; set by `discern.kernels.switched_off`."""
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


def span_obstacle(model: nn.Module, device: torch.device, precision: str) -> str | None:
    """Why the encoders of a model, in its current mode, attend in padded rows; None if they attend to the real tokens alone.

    Args:
        precision: 'float32' or 'bfloat16'.
    """
    from discern.models.base import Encoder

    if device.type != "cuda":
        return "the device is no GPU"
    if SPANS_OFF.get():
        return "it is switched off"
    if precision == "float32":
        return "the precision is float32 (train.precision)"
    for part in model.modules():
        if isinstance(part, Encoder) and not part.takes_spans:
            return f"encoder '{part.config.encoder}' cannot run without padding on a GPU"
        if not isinstance(part, SelfAttention):
            continue
        width = part.query.out_features // part.num_heads
        if part.dropout.active:
            return f"attention dropout is {part.dropout.active:g}; model.attention_dropout=0 is faster"
        if width % 8 or width > _WIDEST_HEAD:
            return f"heads of width {width} are not a multiple of 8 up to {_WIDEST_HEAD}"
    gpu = torch.get_device_module(device)
    if torch.version.hip is not None or gpu.get_device_capability(device) < _AMPERE:
        return f"{gpu.get_device_name(device)} is not NVIDIA's, or older than Ampere, which varlen_attn requires"
    return None


Direction = Literal["both", "left-to-right", "right-to-left"]
"""The part of its document that a token attends to: all of it, itself and what precedes it, or itself and what follows it."""


@dataclass(frozen=True)
class Unpadding:
    """Padded rows, (B, L, D), or the real tokens of all rows concatenated, (T, D).

    Attributes:
        visible: (B, 1, Q, L) which keys each query of a row sees; None: all, or the tokens are concatenated.
        offsets: (S + 1,) start of each span of tokens that see each other, and the end of the last; None: padded rows.
        places: (T,) index of each token among the B * L positions; None: all positions are real.
        longest: at least the length of the longest span, for `attend_in_spans` on a GPU; None: the CPU's kernels attend.
        direction: the part of its span that a token attends to on a GPU; in padded rows, `visible` says it.
        causal: (T,) True = the token attends left to right on a GPU, whatever `direction` is; None: no token.
        directions: (S,) the direction of each span for the CPU's kernels, see `kernels.attention`; None: both.
    """

    visible: Bool[Tensor, "B 1 Q L"] | None = None
    offsets: Int[Tensor, "spans_and_1"] | None = None
    places: Int[Tensor, "T"] | None = None
    longest: int | None = None
    direction: Direction = "both"
    causal: Bool[Tensor, "T"] | None = None
    directions: Int8[Tensor, "spans"] | None = None


def plan_unpadding(
    input_ids: Int[Tensor, "B L"],
    attention_mask: Bool[Tensor, "B L"] | None,
    document_ids: Int[Tensor, "B L"] | None,
    weights: Tensor,
    direction: Direction = "both",
    *,
    contiguous: bool = False,
    spans: Spans | None = None,
    is_causal: Bool[Tensor, "B"] | None = None,
) -> Unpadding:
    """The fastest layout of these rows: the real tokens alone if something can attend to spans, padded rows otherwise.

    Args:
        document_ids: equal ids of a row are contiguous.
        weights: any weight of the encoder; kernels need float32 on the CPU.
        contiguous: whether distances matter, so that the real tokens of a document must be neighbors; with holes between them,
            the rows stay padded.
        spans: the spans, if the host has found them for a GPU that can attend to them.
        is_causal: rows whose direction is left to right; None: none of them.
    """
    # Of each position
    causal = None if is_causal is None else is_causal[:, None].expand(input_ids.shape).flatten()
    if spans is not None:
        causal = causal if causal is None or spans.places is None else causal[spans.places]
        return Unpadding(offsets=spans.offsets, places=spans.places, longest=spans.longest, direction=direction, causal=causal)
    found = None
    if kernels.usable(parameters=[weights]) and input_ids.numel():
        found = find_spans(input_ids.shape, attention_mask, document_ids)
    if found is None or (contiguous and found.has_holes):
        if document_ids is not None and attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        visible = None if attention_mask is None else visible_keys(attention_mask, document_ids)
        if direction != "both":
            visible = visible_one_way(input_ids, attention_mask, document_ids, direction)
        elif is_causal is not None:
            one_way = visible_one_way(input_ids, attention_mask, document_ids, "left-to-right")
            rows = is_causal[:, None, None, None]
            visible = one_way | ~rows if visible is None else torch.where(rows, one_way, visible)
        return Unpadding(visible)
    directions = None
    if direction != "both":
        directions = torch.full((len(found.offsets) - 1,), 1 if direction == "left-to-right" else -1, dtype=torch.int8)
    elif causal is not None:
        directions = (causal if found.places is None else causal[found.places])[found.offsets[:-1]].to(torch.int8)
    return Unpadding(offsets=found.offsets, places=found.places, directions=directions)


def visible_keys(attention_mask: Bool[Tensor, "B L"], document_ids: Int[Tensor, "B L"] | None) -> Bool[Tensor, "B 1 Q L"]:
    """True where a query may see a key: a real token of the same document piece.

    Padding sees padding if it would otherwise see nothing: a softmax over no keys is 0/0, which is NaN in some fused kernels.
    Q is 1 if all queries of a row see the same keys, and L otherwise.
    """
    keys = attention_mask[:, None, None, :]
    if document_ids is None:
        return keys | ~attention_mask.any(1)[:, None, None, None]
    same_piece = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same_piece & (keys | ~attention_mask[:, None, :, None])


def visible_one_way(
    input_ids: Int[Tensor, "B L"],
    attention_mask: Bool[Tensor, "B L"] | None,
    document_ids: Int[Tensor, "B L"] | None,
    direction: Direction,
) -> Bool[Tensor, "#B 1 L L"]:
    """True where a query may see a key that is not ahead of it; always itself, so that no softmax is empty."""
    length = input_ids.shape[1]
    square = torch.ones(length, length, dtype=torch.bool, device=input_ids.device)
    visible = (square.tril() if direction == "left-to-right" else square.triu())[None, None]
    if document_ids is not None:
        visible = visible & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    if attention_mask is not None:
        visible = visible & (attention_mask[:, None, None, :] | torch.eye(length, dtype=torch.bool, device=input_ids.device))
    return visible


def visible_in_window(
    visible: Bool[Tensor, "#B 1 #L L"] | None, length: int, window: int, device: torch.device
) -> Bool[Tensor, "#B 1 #L L"] | None:
    """`visible` without the keys more than `window` positions away; always itself, so that no softmax is empty."""
    # In an exported graph the length is not known yet.
    if not torch.compiler.is_exporting() and length <= window + 1:
        return visible
    places = torch.arange(length, device=device)
    near = ((places[:, None] - places).abs() <= window)[None, None]
    return near if visible is None else (near & visible) | torch.eye(length, dtype=torch.bool, device=device)


def real_tokens(
    places: Int[Tensor, "T"],
    input_ids: Int[Tensor, "B L"],
    token_type_ids: Int[Tensor, "B L"] | None,
    position_ids: Int[Tensor, "#B L"] | None,
) -> tuple[Int[Tensor, "1 T"], Int[Tensor, "1 T"] | None, Int[Tensor, "1 T"]]:
    """The ids of the real tokens as one row, with their positions, which the row no longer implies."""
    length = input_ids.shape[1]
    types = None if token_type_ids is None else token_type_ids.expand_as(input_ids).flatten()[places][None]
    positions = places % length if position_ids is None else position_ids.expand_as(input_ids).flatten()[places]
    return input_ids.flatten()[places][None], types, positions[None]


def padded_rows(hidden: Float[Tensor, "1 T D"], places: Int[Tensor, "T"], shape: torch.Size) -> Float[Tensor, "B L D"]:
    """Padded rows again, with zeros for padding."""
    slots = hidden.new_zeros(shape.numel(), hidden.shape[-1])
    return slots.index_copy(0, places, hidden[0]).view(*shape, -1)


class SelfAttention(nn.Module):
    """Multi-head scaled dot-product attention with dropout on the probabilities, to the whole document or to a window.

    Args:
        config: settings of the encoder.
        bias: whether the projections have biases, as in BERT.
        window: greatest distance of a token that is attended to; None: any.

    Reference: Vaswani et al. 2017, section 3.2.
    """

    def __init__(self, config: ModelConfig, *, bias: bool = True, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.query = nn.Linear(size, size, bias=bias)
        self.key = nn.Linear(size, size, bias=bias)
        self.value = nn.Linear(size, size, bias=bias)
        self.output = nn.Linear(size, size, bias=bias)
        self.dropout = Dropout(config.attention_dropout)

    def forward(
        self, hidden: Float[Tensor, "*tokens D"], unpadding: Unpadding, rotate: Rotation | None = None
    ) -> Float[Tensor, "*tokens D"]:
        """The attended values of each token, heads concatenated. The caller applies `output`, fused with what follows.

        Args:
            unpadding: layout of the batch; in padded rows, its mask has the window.
            rotate: rotation of queries and keys by their positions; None: none.
        """
        # Queries, keys and values side by side, from one product
        projections = (self.query, self.key, self.value)
        weight = torch.cat([projection.weight for projection in projections])
        bias = None if self.query.bias is None else torch.cat([projection.bias for projection in projections])
        packed = F.linear(hidden, weight, bias)
        width = packed.shape[-1] // 3 // self.num_heads
        if unpadding.offsets is not None and unpadding.longest is not None:
            query, key, value = packed.view(-1, 3, self.num_heads, width).unbind(1)
            if rotate is not None:
                query, key = rotate.of_tokens(query), rotate.of_tokens(key)
            bounds = unpadding.offsets, unpadding.longest
            attended = attend_in_spans(query, key, value, *bounds, self.window, unpadding.direction)
            if unpadding.causal is not None:
                # Both ways for all tokens: one call has one direction, and the number of causal tokens is not known here.
                one_way = attend_in_spans(query, key, value, *bounds, self.window, "left-to-right")
                attended = torch.where(unpadding.causal[:, None, None], one_way, attended)
            return attended.reshape(hidden.shape)
        if unpadding.offsets is not None:
            flat = packed.flatten(0, -2)
            rotation = None if rotate is None else (rotate.cosine.flatten(0, -2), rotate.sine.flatten(0, -2))
            attended = kernels.attention(
                flat,
                self.num_heads,
                unpadding.offsets,
                self.dropout.active,
                self.window,
                rotation=rotation,
                directions=unpadding.directions,
            )
            return attended.view(hidden.shape)
        query, key, value = packed.view(*packed.shape[:2], 3, self.num_heads, width).transpose(1, 3).unbind(2)
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        visible = unpadding.visible
        if query.device.type == "cpu" and not torch.compiler.is_compiling():
            # Computed step by step: torch's fused kernel has no dropout here, and was slower up to 512 positions.
            scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-1, -2)
            if visible is not None:
                # The smallest finite number instead of -inf, so that the result is finite for any mask.
                scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
            # Softmax returns float32 under autocast; the product with the values casts it back.
            attended = self.dropout(scores.softmax(-1).to(value.dtype)) @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=self.dropout.active)
        return attended.transpose(1, 2).flatten(2)

    def forward_flops(self, length: int) -> float:
        """FLOPs per token of documents of `length` tokens: four projections, scores and weighted values."""
        window, seen = self.window, float(length)
        if window is not None and window < length:
            seen = (length * (2 * window + 1) - window * (window + 1)) / length
        return parts_flops(length, self.query, self.key, self.value, self.output) + 4 * self.value.out_features * seen


class TransformerBlock(SumOfParts):
    """The layers of a block: attention and feed-forward, each with dropout, a residual and a LayerNorm.

    Args:
        config: settings of the encoder.

    Attributes:
        attention_class: its attention, which has its last layer as `output`.
        activation: activation of the feed-forward layers, by its name in the configuration.

    Reference: Vaswani et al. 2017; GELU by the error function, as BERT and ELECTRA have it.
    """

    attention_class: ClassVar[type[nn.Module]] = SelfAttention
    activation: str = "gelu"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention: Any = self.attention_class(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.expand = nn.Linear(config.hidden_size, config.feedforward_size)
        self.contract = nn.Linear(config.feedforward_size, config.hidden_size)
        self.feedforward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    def after_attention(self, attended: Float[Tensor, "*tokens D"], residual: Float[Tensor, "*tokens D"]) -> States:
        """The states after a post-norm block, whose LayerNorms follow the residuals.

        Args:
            attended: what attention gives, before its last layer.
            residual: the states that it is added to.
        """
        states = linear_residual_norm(self.attention.output, attended, residual, self.attention_norm, self.dropout)
        inner = linear_activation(self.expand, states.operand, self.activation)
        return linear_residual_norm(self.contract, inner, states.values, self.feedforward_norm, self.dropout)


def neighbor_of(head: int) -> int:
    """The relative position that a head attends to when heads begin locally: -1, +1, -2, +2, ..."""
    return (head // 2 + 1) * (1 if head % 2 else -1)
