"""The XLNet encoder: relative positions, memory, and a content and a query stream that share every weight.

Objectives that predict tokens in some order build it with `build_encoder(build_embeddings(V, D, config), config)` and its head
with `encoder.language_head()`, and call `XLNetEncoder.two_streams`. Other objectives use it like any encoder;
then only the content stream runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.utils.checkpoint import checkpoint

from discern.errors import ConfigError
from discern.models.base import Encoder
from discern.models.embeddings import TokenEmbeddings, WordEmbeddings
from discern.models.fused_ops import Dropout, States, as_states, linear_activation, linear_residual_norm
from discern.models.heads import TiedLMHead
from discern.models.xlnet.config import XLNetConfig
from discern.models.xlnet.relative_attention import RelativeAttention, Sight, Surroundings, distances, look, sinusoids
from discern.models.xlnet.two_stream import Content, Factorization, Remembering, Streams, forget, see_all


class XLNetBlock(nn.Module):
    """Relative attention and feed-forward, each with dropout, a residual and a LayerNorm after it.

    The tokens of both streams are concatenated, content first, so that all matrix products except those of the attention are
    computed once for both.

    Differs: the released code also applies dropout after the activation; table 7 of the paper states 0 for it, as here.
    """

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        self.attention = RelativeAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.expand = nn.Linear(config.hidden_size, config.feedforward_size)
        self.contract = nn.Linear(config.feedforward_size, config.hidden_size)
        self.feedforward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)
        self.activation = config.activation

    def forward(
        self,
        states: States,
        memory: Float[Tensor, "B M D"] | None,
        surroundings: Surroundings,
        content: Sight | None,
        query: Sight | None,
    ) -> States:
        """The hidden states after this block.

        Args:
            states: (B * (L + P), D), the content of all rows, then the queries of all rows.
            content: what the content stream sees; None if its states are no longer needed, and only those of the queries are
                returned.
            query: what the query stream sees; None if there is no query stream.
        """
        attended = self.attention(states.operand, memory, surroundings, content, query)
        residual = states.values[len(states.values) - len(attended) :]
        states = linear_residual_norm(self.attention.output, attended, residual, self.attention_norm, self.dropout)
        inner = linear_activation(self.expand, states.operand, self.activation)
        return linear_residual_norm(self.contract, inner, states.values, self.feedforward_norm, self.dropout)


class XLNetEncoder(Encoder):
    """Token ids to hidden states, with relative positions; or to states that predict tokens without having seen them.

    There is no table of positions, so rows may have any length; `max_positions` and `num_token_types` of the configuration are
    not used. Only whether two tokens are in the same segment matters.

    Args:
        embeddings: word embeddings, as wide as the hidden states.
        config: sizes, `clamp_length` and `activation`.
        gradient_checkpointing: recompute each block in the backward pass.

    Raises:
        ConfigError: the embeddings are of another kind, or not as wide as the hidden states.

    Reference: Yang et al. 2019 (XLNet), section 2; Dai et al. 2019 (Transformer-XL), section 3. Each block has its own biases of
    the attention ("untied"), as in the released models.
    Differs: dropout of the table of distances is drawn once per batch, not once per row.
    """

    Config = XLNetConfig
    config: XLNetConfig
    embeddings_class = WordEmbeddings
    disentangled_class = None
    head_class = TiedLMHead
    fine_tuning: ClassVar[Mapping[str, object]] = {"finetune.frame": "cls-last", "classification.head": "summary"}
    limits_positions = False
    reads_backwards = True

    def __init__(self, embeddings: TokenEmbeddings, config: XLNetConfig, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        _check(config, embeddings)
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self._run_two_streams: Callable[..., Streams] = XLNetEncoder._two_streams
        self.embeddings = embeddings
        # Input of the query stream at every predicted position; `mask_emb` in the released code.
        self.query_embedding = Parameter(torch.zeros(1, config.hidden_size))
        self.blocks = nn.ModuleList(XLNetBlock(config) for _ in range(config.num_layers))
        self.dropout = Dropout(config.hidden_dropout)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw all weights, including the biases of the attention and the query embedding, from a normal without truncation.

        Reference: zihangdai/xlnet, which uses TensorFlow's default for the query embedding; here, and in transformers, it is
        initialized like the other weights.
        """
        weights: list[Tensor] = [self.query_embedding]
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                weights.append(part.weight)
            if isinstance(part, RelativeAttention):
                weights += [part.content_bias, part.position_bias, part.segment_bias, part.segments]
        for weight in weights:
            nn.init.normal_(weight, std=self.config.initializer_range, generator=generator)

    def forward_flops(self, length: int, *, query_share: float = 0.0, remembered: int = 0) -> float:
        """As in `Encoder`, without the keys for the distances, which all rows of a batch share.

        With a query stream, the content states of the last block are not computed, only its keys and values.
        """
        size, keys = self.config.hidden_size, length + remembered
        # Query and output, scores by content and by distance, the sum of the values, feed-forward.
        asking = 4 * size**2 + 2 * size * (keys + (keys + length) + keys) + 4 * size * self.config.feedforward_size
        asked = 4 * size**2 * keys / length
        layers = self.config.num_layers
        return layers * asked + (layers - (query_share > 0)) * asking + layers * query_share * asking

    def recomputed_flops(self, length: int, *, query_share: float = 0.0, remembered: int = 0) -> float:
        return self.forward_flops(length, query_share=query_share, remembered=remembered) if self.gradient_checkpointing else 0.0

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile both forward passes, with the arguments of `torch.compile`."""
        super().compile(*args, **kwargs)
        # Not bound to this encoder: a copy of it, which may be compiled again, has to run on its own weights.
        self._run_two_streams = torch.compile(XLNetEncoder._two_streams, *args, **kwargs)

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B L"] | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        document_ids: Int[Tensor, "B L"] | None = None,
        is_reversed: Bool[Tensor, "B"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Hidden states of the content stream, which sees all tokens. `position_ids` are not used, as positions are relative.

        Rows may be padded on either side, without an effect on the states of real tokens.

        Args:
            is_reversed: as in `content_stream`.
        """
        visible = see_all(attention_mask, document_ids)
        hidden = self.content_stream(input_ids, visible, token_type_ids, is_reversed=is_reversed).hidden
        # Gives the query embedding a gradient of zero: in distributed training, every parameter must have a gradient.
        return hidden + 0 * self.query_embedding if torch.is_grad_enabled() else hidden

    def content_stream(
        self,
        input_ids: Int[Tensor, "B L"],
        visible: Bool[Tensor, "B L L"] | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        *,
        memory: Float[Tensor, "N B M D"] | None = None,
        is_reversed: Bool[Tensor, "B"] | None = None,
        remembering: Remembering | None = None,
    ) -> Content:
        """The state of every position, and the memory for the next row of each slot.

        Args:
            visible: as in `Factorization`; None: every position sees every other. Each position also sees itself.
            token_type_ids: segments; None: all tokens are in segment 0, as memory always is.
            memory: memory returned by the previous step; None: no memory. This differs from a memory of zeros, which would be
                attended to.
            is_reversed: True = the text of the row runs backwards, and its distances change sign; None: no row does.
            remembering: how much to remember; None: nothing.
        """
        rows = _Rows.of(is_reversed, input_ids.device)
        input_ids, visible, token_type_ids = rows.sort(input_ids), rows.sort(visible), rows.sort(token_type_ids)
        memory, sizes = rows.sort(memory, 1), rows.sizes(input_ids)
        sight = look(input_ids, visible, token_type_ids, _length(memory))
        states, kept = self._run(self._content(input_ids), memory, remembering, sizes, sight, None)
        hidden = self.dropout(states.operand.view(sizes.batch, sizes.length, self.config.hidden_size))
        return Content(rows.restore(hidden), rows.restore(kept, 1))

    def two_streams(
        self,
        input_ids: Int[Tensor, "B L"],
        factorization: Factorization,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        *,
        memory: Float[Tensor, "N B M D"] | None = None,
        is_reversed: Bool[Tensor, "B"] | None = None,
        remembering: Remembering | None = None,
    ) -> Streams:
        """The state that predicts each chosen position, and the memory for the next row of each slot.

        The query stream runs only on the chosen positions. The content states of the last block are not computed. If a position
        sees neither tokens nor memory, its state does not depend on any token.

        Args:
            input_ids: all tokens, including those to predict, which `factorization.visible` hides.
            token_type_ids, memory, is_reversed, remembering: as in `content_stream`.
        """
        return self._run_two_streams(
            self,
            input_ids,
            factorization,
            token_type_ids,
            memory=memory,
            is_reversed=is_reversed,
            remembering=remembering,
        )

    def _two_streams(
        self,
        input_ids: Int[Tensor, "B L"],
        factorization: Factorization,
        token_type_ids: Int[Tensor, "B L"] | None,
        *,
        memory: Float[Tensor, "N B M D"] | None,
        is_reversed: Bool[Tensor, "B"] | None,
        remembering: Remembering | None,
    ) -> Streams:
        rows = _Rows.of(is_reversed, input_ids.device)
        input_ids, token_type_ids, memory = rows.sort(input_ids), rows.sort(token_type_ids), rows.sort(memory, 1)
        visible, positions = rows.sort(factorization.visible), rows.sort(factorization.positions)
        sizes, before, predicted = rows.sizes(input_ids), _length(memory), positions.shape[1]
        content = look(input_ids, visible, token_type_ids, before)
        query = look(input_ids, visible, token_type_ids, before, positions)
        start = self.dropout(self.query_embedding.expand(sizes.batch * predicted, -1).contiguous())
        tokens = torch.cat([self._content(input_ids), start])
        states, kept = self._run(tokens, memory, remembering, sizes, content, query)
        hidden = self.dropout(states.operand.view(sizes.batch, predicted, self.config.hidden_size))
        return Streams(rows.restore(hidden), rows.restore(kept, 1))

    def _content(self, input_ids: Int[Tensor, "B L"]) -> Float[Tensor, "tokens D"]:
        return self.dropout(self.embeddings.words(input_ids)).flatten(0, 1)  # type: ignore[no-any-return]

    def _run(
        self,
        tokens: Float[Tensor, "tokens D"],
        memory: Float[Tensor, "N B M D"] | None,
        remembering: Remembering | None,
        sizes: _Sizes,
        content: Sight,
        query: Sight | None,
    ) -> tuple[States, Float[Tensor, "N B remembered D"] | None]:
        """The output of the last block, and the memory for the next step."""
        if memory is not None and memory.shape[:2] != (len(self.blocks), sizes.batch):
            raise ValueError(f"memory has shape {tuple(memory.shape)}, expected {len(self.blocks)} blocks and {sizes.batch} rows")
        surroundings = self._surroundings(sizes, _length(memory))
        states = as_states(tokens)
        kept: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if remembering is not None:
                here = (
                    states.values[: sizes.batch * sizes.length].detach().view(sizes.batch, sizes.length, self.config.hidden_size)
                )
                kept.append(here[:, : remembering.reuse_length])
            # If the output is that of the queries, the content states of the last block are not needed.
            unread = query is not None and number == len(self.blocks) - 1
            given = (states, None if memory is None else memory[number], surroundings, None if unread else content, query)
            if self.gradient_checkpointing and self.training:
                states = checkpoint(block, *given, use_reentrant=False)
            else:
                states = block(*given)
        new = None if remembering is None else forget(memory, torch.stack(kept), remembering.memory_length)
        return states, new

    def _surroundings(self, sizes: _Sizes, before: int) -> Surroundings:
        """The tables of distances for the rows that run forwards and for those that run backwards."""
        device = self.query_embedding.device
        apart = distances(sizes.length, before + sizes.length, device)
        directions = [apart] * (sizes.forward > 0 or sizes.batch == 0) + [-apart] * (sizes.forward < sizes.batch)
        table = sinusoids(torch.stack(directions), self.config.hidden_size, self.config.clamp_length)
        return Surroundings(self.dropout(table), sizes.batch, sizes.length, sizes.forward)


@dataclass(frozen=True)
class _Sizes:
    """B and L of a batch, and the number of rows that run forwards, which come first."""

    batch: int
    length: int
    forward: int


TensorOrNone = TypeVar("TensorOrNone", Tensor, Tensor | None)


@dataclass(frozen=True)
class _Rows:
    """Sorts the rows of a batch so that those that run forwards come first; each direction is then a single product.

    Attributes:
        order: (B,) original index of each sorted row; None if the rows are already sorted.
        num_reversed: number of rows that run backwards.
    """

    order: Int[Tensor, "B"] | None = None
    num_reversed: int = 0

    @classmethod
    def of(cls, is_reversed: Bool[Tensor, "B"] | None, device: torch.device) -> _Rows:
        """The order for the given directions, which are best on the CPU: reading them makes the host wait for a device."""
        flags = [] if is_reversed is None else is_reversed.tolist()
        order = sorted(range(len(flags)), key=flags.__getitem__)
        if is_reversed is None or order == list(range(len(flags))):
            return cls(None, sum(flags))
        return cls(torch.tensor(order).to(device, non_blocking=True), sum(flags))

    def sort(self, tensor: TensorOrNone, dim: int = 0) -> TensorOrNone:
        """Sort the rows."""
        return tensor if tensor is None or self.order is None else tensor.index_select(dim, self.order)

    def restore(self, tensor: TensorOrNone, dim: int = 0) -> TensorOrNone:
        """Restore the original order of sorted rows."""
        return tensor if tensor is None or self.order is None else tensor.index_select(dim, self.order.argsort())

    def sizes(self, input_ids: Int[Tensor, "B L"]) -> _Sizes:
        """The sizes of a batch of these rows."""
        batch, length = input_ids.shape
        return _Sizes(batch, length, batch - self.num_reversed)


def _length(memory: Tensor | None) -> int:
    """M, the number of remembered positions."""
    return 0 if memory is None else memory.shape[2]


def _check(config: XLNetConfig, embeddings: TokenEmbeddings) -> None:
    """Raise an error for embeddings that XLNet does not support."""
    if not isinstance(embeddings, WordEmbeddings):
        raise ConfigError(
            "encoder 'xlnet' reads words without positions and segments, which this objective's embeddings have",
            hint="set model.encoder=bert, or another objective",
        )
    if embeddings.embedding_size != config.hidden_size:
        raise ConfigError(
            f"encoder 'xlnet' reads embeddings as wide as its hidden states: model.embedding_size is "
            f"{embeddings.embedding_size}, model.hidden_size {config.hidden_size}",
            hint=f"set model.embedding_size={config.hidden_size}",
        )
