"""The contract of an encoder, an encoder with its head, how both are built by name, and their weights at step 0."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.utils.checkpoint import checkpoint

from discern.models import encoders
from discern.models.architecture import WORDS, Architecture, Predicts
from discern.models.attention import Direction, Unpadding, padded_rows, plan_unpadding, real_tokens
from discern.models.config import ModelConfig
from discern.models.heads import (
    BilinearTerm,
    CopyMLMHead,
    EnergyHead,
    MaskedLMHead,
    ReplacedTokenHead,
    TiedLMHead,
    TokenHead,
)
from discern.models.layers import (
    Disentangled,
    DisentangledEmbeddings,
    Embeddings,
    States,
    TokenEmbeddings,
    WordEmbeddings,
    module_flops,
    parts_flops,
)
from discern.types import Spans

_EMBEDDINGS = "encoder.embeddings."


class Encoder(nn.Module, abc.ABC):
    """Token ids to hidden states, one per position. Base of every architecture.

    Attributes:
        Config: class of its settings.
        architecture: how it is stored in the format of transformers.
        config: its settings.
        embeddings: embeddings that this encoder reads, possibly shared with another encoder.
        embeddings_class: class of its embeddings, unless it shares those of another network.
        disentangled_class: class of its embeddings if they are those of another network plus a difference; None: it cannot share
            embeddings with a generator.
        head_class: class of the head that predicts words from its states.
        one_way: whether it can be built with a `direction`, so that a token does not attend to what is behind, or ahead of, it,
            and its `forward` takes `is_causal`.
        fine_tuning: its default settings of fine-tuning, by dotted key; `classification.head` and the like apply to tasks of
            that family, `questions.head` and the like to every task of question answering.
        position_tables: settings any of which adds a table of positions, which limits rows to `config.max_positions`; None: it
            always has one.
        has_query_stream: whether it also computes states that predict tokens without having seen them.
        reads_backwards: whether its `forward` also takes `is_reversed`, (B,) True = the row's text runs backwards.
        takes_spans: whether its `forward` also takes `spans` as its last argument, and then attends without padding.
    """

    Config: ClassVar[type[ModelConfig]]
    architecture: ClassVar[Architecture] = Architecture()
    embeddings_class: ClassVar[type[WordEmbeddings]] = Embeddings
    disentangled_class: ClassVar[type[Disentangled] | None] = DisentangledEmbeddings
    head_class: ClassVar[type[TiedLMHead]] = MaskedLMHead
    fine_tuning: ClassVar[Mapping[str, object]] = {}
    one_way: ClassVar[bool] = False
    position_tables: ClassVar[tuple[str, ...] | None] = None
    has_query_stream: ClassVar[bool] = False
    reads_backwards: ClassVar[bool] = False
    takes_spans: ClassVar[bool] = False
    config: ModelConfig
    embeddings: TokenEmbeddings
    gradient_checkpointing = False

    def __init_subclass__(cls) -> None:
        # Not inherited: an encoder derived from another computes something else than the class of transformers.
        cls.architecture = cls.__dict__.get("architecture", Architecture())

    def run_block(self, block: nn.Module, *given: Any) -> States:
        """The states after a block, which is recomputed in the backward pass if that was asked for."""
        if self.gradient_checkpointing and self.training:
            return checkpoint(block, *given, use_reentrant=False)  # type: ignore[no-any-return]
        return block(*given)  # type: ignore[no-any-return]

    def language_head(self, config: ModelConfig | None = None) -> TiedLMHead:
        """A new head that predicts words from this encoder's states, tied to its word table, or to the one it shares.

        Args:
            config: settings of the head; None: those of the encoder.
        """
        return self.head_class(config or self.config, self.embeddings.table)

    @classmethod
    def limits_positions(cls, setting: Callable[[str], Any]) -> bool:
        """Whether rows are limited to `max_positions`.

        Args:
            setting: returns the value of a setting of the encoder.
        """
        return cls.position_tables is None or any(map(setting, cls.position_tables))

    def for_tasks(self) -> Encoder:
        """This encoder as tasks read it, without what only serves to predict words; it shares its weights."""
        return self

    def initialize(self, generator: torch.Generator) -> None:
        """Fill the weights whose initial values differ from the rules of `discern.models.base`."""

    def glorot_layers(self) -> list[nn.Linear]:
        """Layers whose weights are initialized Glorot uniform."""
        return []

    def stacked_layers(self) -> Mapping[nn.Linear, int]:
        """Layers whose weight holds several matrices of equal height, one below the other, with the number of matrices.

        An encoder that computes query, key and value in one layer returns that layer with 3. Optimizer 'muon' needs it.
        """
        return {}

    def repeated_blocks(self) -> list[nn.Module]:
        """Modules of the same structure that make up most of the network, to be compiled one by one; empty if it has none."""
        return []

    @abc.abstractmethod
    def forward_flops(self, length: int, *, query_share: float = 0.0, remembered: int = 0) -> float:
        """FLOPs of the matrix products of a forward pass, per token of rows of `length` tokens.

        Args:
            query_share: fraction of the positions that the query stream also computes; 0 for an encoder without one.
            remembered: positions of earlier rows that each row attends to.
        """

    def recomputed_flops(self, length: int, **streams: Any) -> float:
        """The part of `forward_flops` that gradient checkpointing computes again in the backward pass; 0 without it."""
        return self.forward_flops(length, **streams) if self.gradient_checkpointing else 0.0

    @abc.abstractmethod
    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B L"] | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        document_ids: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Hidden states of the last layer.

        Args:
            attention_mask: True = real token; None: all are.
            token_type_ids: segments; None: all 0.
            position_ids: None: 0, 1, 2, ...
            document_ids: tokens attend only to tokens with the same id, which are contiguous; None: a row is one document.
        """


@dataclass(frozen=True)
class Network:
    """An encoder with its head: one of an objective's networks.

    Attributes:
        encoder: ids to hidden states.
        head: hidden states to logits.
        bilinear: a term added to the logits of a discriminator's head, or None.
        companions: modules that are trained with it and used only in training; they are not exported.
    """

    encoder: Encoder
    head: nn.Module
    bilinear: BilinearTerm | None = None
    companions: tuple[nn.Module, ...] = ()

    @property
    def predicts(self) -> Predicts:
        """What the head outputs."""
        return getattr(self.head, "predicts", "nothing")

    @property
    def predicts_words(self) -> bool:
        """Whether the head is over the vocabulary."""
        return self.predicts in ("words", "words or copies")

    def token_logits(
        self, input_ids: Int[Tensor, "B L"], *context: Bool[Tensor, "B L"] | Int[Tensor, "B L"] | Spans | None
    ) -> Float[Tensor, "B L *V"]:
        """The head's logits at every position; `context` are the encoder's other arguments, mask first."""
        positions: Any = context[2] if len(context) > 2 else None
        return self.logits_of(self.encoder(input_ids, *context), input_ids, positions)

    def logits_of(
        self, hidden: Float[Tensor, "B L D"], input_ids: Int[Tensor, "B L"], position_ids: Int[Tensor, "B L"] | None = None
    ) -> Float[Tensor, "B L *V"]:
        """The head's logits, given the encoder's hidden states of these ids, and their positions unless a row is one text."""
        logits: Tensor = self.head(hidden, position_ids) if isinstance(self.head, TokenHead) else self.head(hidden)
        if self.bilinear is not None:
            logits = logits + self.bilinear(hidden, self.encoder.embeddings.words(input_ids))
        return logits

    def parts(self) -> list[nn.Module]:
        """All modules of the network."""
        parts = [self.encoder, self.head, self.bilinear, *self.companions]
        return [part for part in parts if part is not None]

    def trained(self) -> set[Parameter]:
        """The parameters that training this network updates, without those of another network that it reads without gradient."""
        held = {parameter for part in self.parts() for parameter in part.parameters()}
        return held - set(self.encoder.embeddings.detached_parameters())


class StackedEncoder(Encoder):
    """Base of encoders with a stack of blocks. A subclass builds `blocks` and computes the states of the last one.

    Args:
        embeddings: possibly shared with another encoder.
        config: settings; its embedding_size is not used, the embeddings have their own.
        gradient_checkpointing: recompute each block in the backward pass.
        direction: what a token attends to; in one direction, this is a tower of a language model.
        projection_bias: whether a projection of the embeddings to the hidden size has a bias.

    Attributes:
        contiguous: whether distances matter, so that the real tokens of a document must be neighbors.
    """

    one_way = True
    takes_spans = True
    contiguous = False
    blocks: nn.ModuleList

    def __init__(
        self,
        embeddings: TokenEmbeddings,
        config: ModelConfig,
        *,
        gradient_checkpointing: bool = False,
        direction: Direction = "both",
        projection_bias: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.direction = direction
        self.gradient_checkpointing = gradient_checkpointing
        self.embeddings = embeddings
        width, size = embeddings.embedding_size, config.hidden_size
        self.projection = nn.Linear(width, size, bias=projection_bias) if width != size else None

    def repeated_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def blocks_flops(self, length: int) -> float:
        """FLOPs of all blocks per token of rows of `length` tokens."""
        return module_flops(self.blocks, length)

    def forward_flops(self, length: int, **_: Any) -> float:
        return parts_flops(length, self.projection) + self.blocks_flops(length)

    def recomputed_flops(self, length: int, **_: Any) -> float:
        return self.blocks_flops(length) if self.gradient_checkpointing else 0.0

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B L"] | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        document_ids: Int[Tensor, "B L"] | None = None,
        spans: Spans | None = None,
        is_causal: Bool[Tensor, "B"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Hidden states of the last block; those of padding are undefined.

        Args:
            is_causal: rows in which a token attends only to itself and what precedes it; None: none of them.
        """
        shape, rows = input_ids.shape, (input_ids, attention_mask, document_ids)
        weights, direction = self.embeddings.weights, self.direction
        unpadding = plan_unpadding(*rows, weights, direction, contiguous=self.contiguous, spans=spans, is_causal=is_causal)
        if unpadding.places is not None:
            input_ids, token_type_ids, position_ids = real_tokens(unpadding.places, input_ids, token_type_ids, position_ids)
        hidden = self.last_states(input_ids, token_type_ids, position_ids, unpadding)
        return hidden if unpadding.places is None else padded_rows(hidden, unpadding.places, shape)

    @abc.abstractmethod
    def last_states(
        self,
        input_ids: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None,
        position_ids: Int[Tensor, "#B L"] | None,
        unpadding: Unpadding,
    ) -> Float[Tensor, "B L D"]:
        """Hidden states of the last block, for padded rows or for the real tokens as one row."""


def build_encoder(embeddings: TokenEmbeddings, config: ModelConfig, *, gradient_checkpointing: bool = False) -> Encoder:
    """The encoder that `config.encoder` names.

    Raises:
        ConfigError: there is no such encoder; the hint names the nearest.
    """
    build = encoders.load(config.encoder)
    return build(embeddings, config, gradient_checkpointing=gradient_checkpointing)  # type: ignore[no-any-return]


def build_embeddings(vocab_size: int, embedding_size: int, config: ModelConfig) -> WordEmbeddings:
    """Embeddings for the encoder that `config.encoder` names.

    Raises:
        ConfigError: there is no such encoder; the hint names the nearest.
    """
    return encoders.load(config.encoder).embeddings_class(vocab_size, embedding_size, config)  # type: ignore[no-any-return]


def build_head(encoder: Encoder, predicts: Predicts) -> nn.Module:
    """A new head of an encoder; an `nn.Identity` if it predicts nothing."""
    if predicts == "nothing":
        return nn.Identity()
    if predicts in ("replaced", "energy"):
        return (ReplacedTokenHead if predicts == "replaced" else EnergyHead)(encoder.config)
    words = encoder.language_head()
    return words if predicts == "words" else CopyMLMHead(encoder.config, words)


def named_parameters(network: Network) -> dict[str, Tensor]:
    """Parameters as `encoder.*`, `head.*` and `bilinear.*`; one that is shared with the head is the encoder's.

    Embeddings that are those of another network plus a difference are summed, and a head that copies has the names of the head
    over the vocabulary that it contains.
    """
    encoder = network.encoder
    found: dict[str, Tensor] = {f"encoder.{name}": value for name, value in encoder.named_parameters()}
    taken = {id(value) for value in found.values()}
    if isinstance(encoder.embeddings, Disentangled):
        found = {name: value for name, value in found.items() if not name.startswith(_EMBEDDINGS)}
        found |= {_EMBEDDINGS + name: value for name, value in encoder.embeddings.merged().named_parameters()}
    for name, value in network.head.named_parameters():
        if id(value) not in taken:
            found[f"head.{name.removeprefix('words.')}"] = value
    bilinear = network.bilinear.named_parameters() if network.bilinear is not None else ()
    return found | {f"bilinear.{name}": value for name, value in bilinear}


@torch.no_grad()
def load_parameters(network: Network, values: Mapping[str, Tensor], *, with_shared: bool = False) -> None:
    """Set parameters of a network, by the names of `named_parameters`.

    Args:
        with_shared: also set embeddings that it reads from another network, which has no weights of its own.
    """
    embeddings = network.encoder.embeddings
    if isinstance(embeddings, Disentangled):
        if with_shared:
            for key, parameter in embeddings.shared.named_parameters():
                parameter.copy_(values[_EMBEDDINGS + key])
        embeddings.difference.weight.copy_(values[WORDS] - embeddings.shared.word.weight)
        if isinstance(embeddings, DisentangledEmbeddings):
            for key, parameter in embeddings.norm.named_parameters():
                parameter.copy_(values[f"{_EMBEDDINGS}norm.{key}"])
        values = {key: value for key, value in values.items() if not key.startswith(_EMBEDDINGS)}
    parameters = named_parameters(network)
    for key, value in values.items():
        parameters[key].copy_(value)


def load_networks(
    networks: Mapping[str, Network], values: Mapping[str, Mapping[str, Tensor]], *, with_shared: bool = False
) -> tuple[str, str] | None:
    """Set parameters of networks that may share some of them.

    Returns:
        Name of a network and of a parameter that another network has overwritten with its own; None if there is none.
    """
    # Those that read the embeddings of another come last.
    for name in sorted(values, key=lambda name: isinstance(networks[name].encoder.embeddings, Disentangled)):
        load_parameters(networks[name], values[name], with_shared=with_shared)
    for name, wanted in values.items():
        weights = named_parameters(networks[name])
        for key, value in wanted.items():
            if not torch.allclose(weights[key], value, rtol=1e-5, atol=1e-6):
                return name, key
    return None


def encoders_by_type() -> dict[str, type[Encoder]]:
    """Encoders by the values of `model_type` in config.json of their models."""
    from discern.models.two_tower.encoder import TwoTowerEncoder

    known = [*((name, encoders.load(name)) for name in encoders.names()), ("", TwoTowerEncoder)]
    return {model_type: kind for name, kind in known for model_type in kind.architecture.titles or (name,)}


@torch.no_grad()
def initialize(module: nn.Module, generator: torch.Generator, config: ModelConfig) -> None:
    """Fill every weight of a network, drawing from `generator`; a shared part is filled once.

    Matrices and embeddings come from a normal that is truncated at two standard deviations, biases are 0, LayerNorms 1 and 0.
    The projection of the embeddings and the last layer of the discriminator are Glorot uniform. Then each encoder fills the
    weights that its architecture initializes differently, see `Encoder.initialize`.

    Reference: google-research/electra, modeling.py; TensorFlow's truncated normal has 0.88 of the nominal deviation.
    """
    # Layers with another standard deviation than most, by identity; None: Glorot uniform.
    layers, stds = config.head_layers(), dict[int, float | None]()
    for part in module.modules():
        if isinstance(part, Encoder):
            stds |= {id(layer): None for layer in part.glorot_layers()}
        if isinstance(part, MaskedLMHead | TokenHead) and layers.dense_std is not None:
            stds[id(part.dense)] = layers.dense_std
        if isinstance(part, TokenHead):
            stds[id(part.output)] = layers.output_std
    for part in module.modules():
        if isinstance(part, nn.Linear):
            std = stds.get(id(part), config.linear_std(part.in_features))
            if std is None:
                nn.init.xavier_uniform_(part.weight, generator=generator)
            else:
                truncated_normal(part.weight, generator, std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            truncated_normal(part.weight, generator, config.initializer_range)
        elif isinstance(part, nn.LayerNorm):
            part.reset_parameters()
        elif isinstance(part, TiedLMHead):
            nn.init.zeros_(part.bias)
    for part in module.modules():
        if isinstance(part, Disentangled):
            nn.init.zeros_(part.difference.weight)
        if isinstance(part, Encoder):
            part.initialize(generator)


@torch.no_grad()
def truncated_normal(weight: Tensor, generator: torch.Generator, std: float) -> None:
    """Fill a matrix from a normal that is truncated at two standard deviations."""
    # Not nn.init.trunc_normal_: it draws other numbers before torch 2.13, and a seed means the same weights in every version.
    weight.normal_(0.0, std, generator=generator)
    while (outside := weight.abs() > 2 * std).any():
        weight.copy_(torch.where(outside, torch.empty_like(weight).normal_(0.0, std, generator=generator), weight))
