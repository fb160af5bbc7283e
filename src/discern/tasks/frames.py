"""Input framing: the order of [CLS], the texts and the padding that an encoder expects.

Tasks and heads always use `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, padded on the right, with the state of [CLS] at position
0. A frame moves the tokens to where the encoder expects them, and moves the hidden states back.
"""

from __future__ import annotations

import abc
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from discern.errors import ConfigError
from discern.models.base import Encoder
from discern.models.embeddings import Embeddings
from discern.types import TokenBatch

FrameName = Literal["cls-first", "cls-last"]
_CLS_SEGMENT, _PADDING_SEGMENT = 2, 3


class Frame(abc.ABC):
    """An input framing."""

    @abc.abstractmethod
    def check(self, encoder: Encoder) -> None:
        """Raise a ConfigError if the encoder cannot read this framing."""

    @abc.abstractmethod
    def states(self, encoder: Encoder, tokens: TokenBatch) -> Float[Tensor, "B L D"]:
        """Hidden states of the tokens, in the order of the task's rows."""


class ClsFirst(Frame):
    """`[CLS] A [SEP] B [SEP]`, padded on the right: the rows unchanged. BERT and ELECTRA."""

    def check(self, encoder: Encoder) -> None:
        """Every encoder reads this framing."""

    def states(self, encoder: Encoder, tokens: TokenBatch) -> Float[Tensor, "B L D"]:
        # Encoders of other packages need not take spans; only those that do are given any.
        spans = () if tokens.spans is None else (None, None, tokens.spans)
        return encoder(tokens.input_ids, tokens.visible_mask, tokens.token_type_ids, *spans)  # type: ignore[no-any-return]


class ClsLast(Frame):
    """`A [SEP] B [SEP] [CLS]`, padded on the left, with [CLS] in its own segment. XLNet.

    Reference: zihangdai/xlnet, run_classifier.py; transformers' `XLNetTokenizer`.
    Differs: questions come before their contexts, as for every encoder; run_squad.py puts the context first.
    """

    def check(self, encoder: Encoder) -> None:
        if isinstance(encoder.embeddings, Embeddings):
            raise ConfigError(
                f"finetune.frame 'cls-last' has segments and padding for which encoder '{encoder.config.encoder}' has no tables",
                hint="set finetune.frame=cls-first",
            )

    def states(self, encoder: Encoder, tokens: TokenBatch) -> Float[Tensor, "B L D"]:
        places = cls_last_places(tokens.attention_mask)
        segments = tokens.token_type_ids.masked_fill(~tokens.attention_mask, _PADDING_SEGMENT)
        segments[:, 0] = _CLS_SEGMENT
        given, mask, segments = (_moved(values, places) for values in (tokens.input_ids, tokens.attention_mask, segments))
        hidden: Tensor = encoder(given, None if tokens.full else mask, segments)
        return hidden.gather(1, places[..., None].expand_as(hidden))


FRAMES: dict[FrameName, Frame] = {"cls-first": ClsFirst(), "cls-last": ClsLast()}


def cls_last_places(attention_mask: Bool[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    """Position in the row `[PAD] ... [CLS]` of each token of the row `[CLS] ... [PAD]`; padding keeps its order.

    Args:
        attention_mask: True = real token. The real tokens of a row come first, and there is at least one.
    """
    length = attention_mask.shape[1]
    here = torch.arange(length, device=attention_mask.device)
    padding = length - attention_mask.sum(1, keepdim=True)
    # The first token of the text goes to the first position after the padding, [CLS] to the last.
    places = torch.where(attention_mask, here + padding - 1, here - (length - padding))
    places[:, 0] = length - 1
    return places


def _moved(values: Tensor, places: Int[Tensor, "B L"]) -> Tensor:
    return torch.zeros_like(values).scatter(1, places, values)
