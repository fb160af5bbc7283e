"""The XLNet encoder: relative positions, memory, and a content and a query stream that share every weight.

An objective that predicts in some order builds it with `build_encoder(build_embeddings(V, D, config), config)`, its head with
`build_language_head(embeddings, config)`, and calls `XLNetEncoder.two_streams`. Everything else takes it as any encoder, which
is the content stream alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.utils.checkpoint import checkpoint

from discern.errors import ConfigError
from discern.model.config import ModelConfig
from discern.model.dropout import Dropout
from discern.model.embeddings import TokenEmbeddings, WordEmbeddings
from discern.model.encoder import Encoder
from discern.model.heads import TiedLMHead
from discern.model.joints import States, as_states, linear_activation, linear_residual_norm
from discern.model.relative_attention import RelativeAttention, Sight, Surroundings, distances, look, sinusoids
from discern.model.two_stream import Content, Factorization, Remembering, Streams, forget, see_all


class XLNetBlock(nn.Module):
    """Relative attention and feed-forward, each with dropout, a residual and a LayerNorm after it.

    The tokens of both streams lie one after another, content first, so that every product but attention's is computed once
    for both.

    Differs: google-research/xlnet drops out after the activation too; the paper's table 7 says 0 there, and so it is here.
    """

    def __init__(self, config: ModelConfig) -> None:
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
            content: what the content stream sees; None: its states are not wanted any more, and those of the queries alone
                come out.
            query: what the query stream sees; None: there is none.
        """
        attended = self.attention(states.operand, memory, surroundings, content, query)
        residual = states.values[len(states.values) - len(attended) :]
        states = linear_residual_norm(self.attention.output, attended, residual, self.attention_norm, self.dropout)
        inner = linear_activation(self.expand, states.operand, self.activation)
        return linear_residual_norm(self.contract, inner, states.values, self.feedforward_norm, self.dropout)


class XLNetEncoder(Encoder):
    """Token ids to hidden states, with positions as distances; or, from all tokens but their own, to states that predict them.

    There is no table of positions, so rows may have any length; `max_positions` and `num_token_types` of the configuration say
    nothing here. Only whether two tokens are of the same segment counts, not of which.

    Args:
        embeddings: of the words, as wide as the hidden states.
        config: sizes; `clamp_length` and `activation` too.
        gradient_checkpointing: recompute each block in the backward pass.

    Raises:
        ConfigError: the configuration asks for what XLNet has not.

    Reference: Yang et al. 2019 (XLNet), section 2; Dai et al. 2019 (Transformer-XL), section 3. Biases of the attention are
    each block's own ("untied"), as in the released models.
    Differs: dropout of the table of distances is drawn once a batch, not once a row.
    """

    embeddings_class = WordEmbeddings
    head_class = TiedLMHead
    fine_tuning: ClassVar[Mapping[str, object]] = {"finetune.frame": "cls-last", "classification.head": "summary"}
    limits_positions = False
    reads_backwards = True

    def __init__(self, embeddings: TokenEmbeddings, config: ModelConfig, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        _check(config, embeddings)
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self.embeddings = embeddings
        # What every predicted position starts from: XLNet's `mask_emb`.
        self.query_embedding = Parameter(torch.zeros(1, config.hidden_size))
        self.blocks = nn.ModuleList(XLNetBlock(config) for _ in range(config.num_layers))
        self.dropout = Dropout(config.hidden_dropout)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile both ways through the blocks, with what `torch.compile` takes."""
        super().compile(*args, **kwargs)
        self.two_streams = torch.compile(self.two_streams, *args, **kwargs)  # type: ignore[method-assign]

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B L"] | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        document_ids: Int[Tensor, "B L"] | None = None,
        is_reversed: Bool[Tensor, "B"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Hidden states of the content stream, which sees everything; `position_ids` say nothing that the places don't.

        Padding may stand anywhere: on either side of a row, the real tokens' states are the same.

        Args:
            is_reversed: as of `content_stream`.
        """
        visible = see_all(attention_mask, document_ids)
        hidden = self.content_stream(input_ids, visible, token_type_ids, is_reversed=is_reversed).hidden
        # The gradient of what queries start from is zero here, but there is one: several processes wait for that of every
        # parameter.
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
        """The state of every position, and the memory that the next row of each slot is to see.

        Args:
            visible: as of `Factorization`; None: every position sees every other. Each sees itself besides.
            token_type_ids: segments; None: all the same. Memory is of segment 0.
            memory: as the step before gave it; None: there is none, which is not the same as a memory of zeros, as those are
                attended to.
            is_reversed: True = the row's text runs backwards, and its distances change sign; None: none does.
            remembering: how much to remember; None: nothing.
        """
        rows = _Rows.of(is_reversed)
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
        """The state that predicts each chosen position, and the memory that the next row of each slot is to see.

        The query stream runs on the chosen positions alone, and the content of the last block, which nobody reads, not at all.
        A position that may see nothing, no memory either, gathers nothing: its state depends on no token.

        Args:
            input_ids: all tokens, those that are predicted too: what hides them is `factorization.visible`.
            token_type_ids, memory, is_reversed, remembering: as of `content_stream`.
        """
        rows = _Rows.of(is_reversed)
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
        return self.embeddings(input_ids, None, None).flatten(0, 1)  # type: ignore[no-any-return]

    def _run(
        self,
        tokens: Float[Tensor, "tokens D"],
        memory: Float[Tensor, "N B M D"] | None,
        remembering: Remembering | None,
        sizes: _Sizes,
        content: Sight,
        query: Sight | None,
    ) -> tuple[States, Float[Tensor, "N B remembered D"] | None]:
        """The states that come out of the last block, and the memory of the next step."""
        if memory is not None and memory.shape[:2] != (len(self.blocks), sizes.batch):
            raise ValueError(f"memory is of shape {tuple(memory.shape)}, not of {len(self.blocks)} blocks and {sizes.batch} rows")
        surroundings = self._surroundings(sizes, _length(memory))
        states = as_states(tokens)
        kept: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if remembering is not None:
                here = (
                    states.values[: sizes.batch * sizes.length].detach().view(sizes.batch, sizes.length, self.config.hidden_size)
                )
                kept.append(here[:, : remembering.reuse_length])
            # Nobody reads what the last block makes of the content where the queries are what is asked for.
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
    """B and L of a batch, and how many of its rows, which come first, run forwards."""

    batch: int
    length: int
    forward: int


TensorOrNone = TypeVar("TensorOrNone", Tensor, Tensor | None)


@dataclass(frozen=True)
class _Rows:
    """The rows of a batch with those that run forwards before those that run backwards, so that each kind is one product.

    Attributes:
        order: (B,) where each row of the sorted batch stood; None: they are sorted.
        num_reversed: rows that run backwards.
    """

    order: Int[Tensor, "B"] | None = None
    num_reversed: int = 0

    @classmethod
    def of(cls, is_reversed: Bool[Tensor, "B"] | None) -> _Rows:
        """From the direction of each row."""
        flags = [] if is_reversed is None else is_reversed.tolist()
        order = sorted(range(len(flags)), key=flags.__getitem__)
        if is_reversed is None or order == list(range(len(flags))):
            return cls(None, sum(flags))
        return cls(torch.tensor(order, device=is_reversed.device), sum(flags))

    def sort(self, tensor: TensorOrNone, dim: int = 0) -> TensorOrNone:
        """The rows sorted."""
        return tensor if tensor is None or self.order is None else tensor.index_select(dim, self.order)

    def restore(self, tensor: TensorOrNone, dim: int = 0) -> TensorOrNone:
        """Sorted rows as they stood before."""
        return tensor if tensor is None or self.order is None else tensor.index_select(dim, self.order.argsort())

    def sizes(self, input_ids: Int[Tensor, "B L"]) -> _Sizes:
        """Of a batch of these rows."""
        batch, length = input_ids.shape
        return _Sizes(batch, length, batch - self.num_reversed)


def _length(memory: Tensor | None) -> int:
    """M."""
    return 0 if memory is None else memory.shape[2]


def _check(config: ModelConfig, embeddings: TokenEmbeddings) -> None:
    """Refuse what XLNet has not."""
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
    for key, value, only in (
        ("normalisation", config.normalisation, "post"),
        ("initialisation", config.initialisation, "released"),
    ):
        if value != only:
            raise ConfigError(f"encoder 'xlnet' has no model.{key} '{value}'", hint=f"set model.{key}={only}")
