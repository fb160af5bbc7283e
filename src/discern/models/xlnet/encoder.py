"""The XLNet encoder: relative positions, memory, and a content and a query stream that share every weight.

Objectives that predict tokens in some order build it with `build_encoder(build_embeddings(V, D, config), config)` and its head
with `encoder.language_head()`, and call `XLNetEncoder.two_streams`. Other objectives use it like any encoder;
then only the content stream runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from discern.errors import ConfigError
from discern.models.attention import TransformerBlock
from discern.models.base import Encoder
from discern.models.heads import TiedLMHead
from discern.models.layers import Dropout, States, TokenEmbeddings, WordEmbeddings, as_states
from discern.models.two_stream import Content, Factorization, Remembering, Streams, update_memory
from discern.models.xlnet.config import XLNetConfig
from discern.models.xlnet.huggingface import XLNetArchitecture
from discern.models.xlnet.relative_attention import RelativeAttention, SharedInputs, StreamMask, distances, sinusoids, stream_mask


class XLNetBlock(TransformerBlock):
    """Relative attention and feed-forward, each with dropout, a residual and a LayerNorm after it.

    The tokens of both streams are concatenated, content first, so that all matrix products except those of the attention are
    computed once for both.

    Differs: the released code also applies dropout after the activation; table 7 of the paper states 0 for it, as here.
    """

    attention_class = RelativeAttention

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__(config)
        self.activation = config.activation

    def forward(
        self,
        states: States,
        memory: Float[Tensor, "B M D"] | None,
        shared: SharedInputs,
        content: StreamMask | None,
        query: StreamMask | None,
    ) -> States:
        """The hidden states after this block.

        Args:
            states: (B * (L + P), D), the content of all rows, then the queries of all rows.
            content: what the content stream sees; None if its states are no longer needed, and only those of the queries are
                returned.
            query: what the query stream sees; None if there is no query stream.
        """
        attended = self.attention(states.operand, memory, shared, content, query)
        residual = states.values[len(states.values) - len(attended) :]
        return self.after_attention(attended, residual)


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
    architecture = XLNetArchitecture()
    config: XLNetConfig
    embeddings_class = WordEmbeddings
    disentangled_class = None
    head_class = TiedLMHead
    fine_tuning: ClassVar[Mapping[str, object]] = {"finetune.frame": "cls-last", "classification.head": "summary"}
    position_tables = ()
    has_query_stream = True
    reads_backwards = True

    def __init__(self, embeddings: TokenEmbeddings, config: XLNetConfig, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        if type(embeddings) is not WordEmbeddings:
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
        per_query = 4 * size**2 + 2 * size * (keys + (keys + length) + keys) + 4 * size * self.config.feedforward_size
        per_key = 4 * size**2 * keys / length
        layers = self.config.num_layers
        return layers * per_key + (layers - (query_share > 0)) * per_query + layers * query_share * per_query

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
        # The real tokens of the same document; None: all tokens see all tokens.
        visible = None if attention_mask is None else attention_mask[:, None, :].expand(-1, input_ids.shape[1], -1)
        if document_ids is not None:
            same = document_ids[:, :, None] == document_ids[:, None, :]
            visible = same if visible is None else same & visible
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
        before = 0 if memory is None else memory.shape[2]
        mask = stream_mask(input_ids, visible, token_type_ids, before)
        shared = self._shared_inputs(input_ids, before, is_reversed)
        tokens = self.dropout(self.embeddings.words(input_ids)).flatten(0, 1)
        states, kept = self._run(tokens, memory, remembering, shared, mask, None)
        return Content(self.dropout(states.operand.view(*input_ids.shape, self.config.hidden_size)), kept)

    def two_streams(self, *inputs: Any, **context: Any) -> Streams:
        """The state that predicts each chosen position, and the memory for the next row of each slot; see `_two_streams`."""
        return self._run_two_streams(self, *inputs, **context)

    def _two_streams(
        self,
        input_ids: Int[Tensor, "B L"],
        factorization: Factorization,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        *,
        memory: Float[Tensor, "N B M D"] | None = None,
        is_reversed: Bool[Tensor, "B"] | None = None,
        remembering: Remembering | None = None,
    ) -> Streams:
        """The query stream runs only on the chosen positions. The content states of the last block are not computed.

        If a position sees neither tokens nor memory, its state does not depend on any token.

        Args:
            input_ids: all tokens, including those to predict, which `factorization.visible` hides.
            token_type_ids, memory, is_reversed, remembering: as in `content_stream`.
        """
        visible, positions, before = factorization.visible, factorization.positions, 0 if memory is None else memory.shape[2]
        content = stream_mask(input_ids, visible, token_type_ids, before)
        query = stream_mask(input_ids, visible, token_type_ids, before, positions)
        shared = self._shared_inputs(input_ids, before, is_reversed)
        start = self.dropout(self.query_embedding.expand(positions.numel(), -1).contiguous())
        tokens = torch.cat([self.dropout(self.embeddings.words(input_ids)).flatten(0, 1), start])
        states, kept = self._run(tokens, memory, remembering, shared, content, query)
        return Streams(self.dropout(states.operand.view(*positions.shape, self.config.hidden_size)), kept)

    def _run(
        self,
        tokens: Float[Tensor, "tokens D"],
        memory: Float[Tensor, "N B M D"] | None,
        remembering: Remembering | None,
        shared: SharedInputs,
        content: StreamMask,
        query: StreamMask | None,
    ) -> tuple[States, Float[Tensor, "N B remembered D"] | None]:
        """The output of the last block, and the memory for the next step."""
        batch, length = shared.batch, shared.length
        if memory is not None and memory.shape[:2] != (len(self.blocks), batch):
            raise ValueError(f"memory has shape {tuple(memory.shape)}, expected {len(self.blocks)} blocks and {batch} rows")
        states = as_states(tokens)
        kept: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if remembering is not None:
                here = states.values[: batch * length].detach().view(batch, length, self.config.hidden_size)
                kept.append(here[:, : remembering.reuse_length])
            # If the output is that of the queries, the content states of the last block are not needed.
            unread = query is not None and number == len(self.blocks) - 1
            remembered = None if memory is None else memory[number]
            states = self.run_block(block, states, remembered, shared, None if unread else content, query)
        new = None if remembering is None else update_memory(memory, torch.stack(kept), remembering.memory_length)
        return states, new

    def _shared_inputs(self, input_ids: Int[Tensor, "B L"], before: int, is_reversed: Bool[Tensor, "B"] | None) -> SharedInputs:
        """The distances: of rows that run forwards, and also of those that run backwards if there may be any."""
        batch, length = input_ids.shape
        offsets = distances(length, before + length, input_ids.device)
        directions = offsets[None] if is_reversed is None else torch.stack([offsets, -offsets])
        table = sinusoids(directions, self.config.hidden_size, self.config.clamp_length)
        return SharedInputs(self.dropout(table), batch, length, None if is_reversed is None else is_reversed.int())
