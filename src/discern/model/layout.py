"""Where the tokens of a batch lie while the blocks run over them, and which see each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from discern import kernels

Direction = Literal["both", "left-to-right", "right-to-left"]
"""What a token sees of its document: all of it, itself and what stands before it, or itself and what stands behind."""


@dataclass(frozen=True)
class Layout:
    """Either rows of equal length, (B, L, D), or the real tokens alone, one row's after another's, (T, D).

    Attributes:
        visible: (B, 1, Q, L) which key each query of a row sees; None: all, or the tokens lie one after another.
        offsets: (S + 1,) where each span of tokens that see each other begins, and the end; None: rows of equal length.
        places: (T,) where each token stands among the B * L slots; None: in all of them.
    """

    visible: Bool[Tensor, "B 1 Q L"] | None = None
    offsets: Int[Tensor, "spans_and_1"] | None = None
    places: Int[Tensor, "T"] | None = None


def lay_out(
    input_ids: Int[Tensor, "B L"],
    attention_mask: Bool[Tensor, "B L"] | None,
    document_ids: Int[Tensor, "B L"] | None,
    weights: Tensor,
    direction: Direction = "both",
) -> Layout:
    """The layout that is fastest for these rows: real tokens alone where kernels attend to spans, else rows of equal length.

    Args:
        document_ids: equal ids of a row stand together.
        weights: any of the encoder's; kernels take float32 on the CPU.
        direction: the kernels attend in both directions only.
    """
    if direction != "both":
        return Layout(visible_one_way(input_ids, attention_mask, document_ids, direction))
    if not kernels.usable(parameters=[weights]) or not input_ids.numel():
        if document_ids is not None and attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        return Layout(None if attention_mask is None else visible_keys(attention_mask, document_ids))
    batch, length = input_ids.shape
    if attention_mask is None and document_ids is None:
        return Layout(offsets=torch.arange(0, batch * length + 1, length))
    places = None
    if attention_mask is not None and not attention_mask.all():
        places = attention_mask.flatten().nonzero().flatten()
    row = torch.arange(batch).repeat_interleave(length)
    document = torch.zeros_like(row) if document_ids is None else document_ids.flatten()
    if places is not None:
        row, document = row[places], document[places]
    starts = (row.diff() != 0) | (document.diff() != 0)
    middle = starts.nonzero().flatten() + 1
    return Layout(offsets=torch.cat([middle.new_zeros(1), middle, middle.new_full((1,), len(row))]), places=places)


def visible_keys(attention_mask: Bool[Tensor, "B L"], document_ids: Int[Tensor, "B L"] | None) -> Bool[Tensor, "B 1 Q L"]:
    """True where a query may see a key: real tokens, of the same document piece where rows hold several.

    Padding sees padding where it would see nothing else: a softmax over no key is 0/0, which some fused kernels leave NaN.
    Q is 1 where every query of a row sees the same keys, L otherwise.
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
    """True where a query may see a key that does not lie ahead of it: itself always, so that no softmax is over nothing."""
    length = input_ids.shape[1]
    square = torch.ones(length, length, dtype=torch.bool, device=input_ids.device)
    visible = (square.tril() if direction == "left-to-right" else square.triu())[None, None]
    if document_ids is not None:
        visible = visible & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    if attention_mask is not None:
        visible = visible & (attention_mask[:, None, None, :] | torch.eye(length, dtype=torch.bool, device=input_ids.device))
    return visible
