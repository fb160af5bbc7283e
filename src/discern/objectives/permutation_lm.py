"""Permutation language modelling: XLNet's objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Self, cast

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from discern.config.fields import OTHER_NAME
from discern.corruption.permutation import blocked_pairs, factorization_order
from discern.corruption.randomness import Randomness, key_of
from discern.corruption.targets import legacy_span_targets, single_targets, span_targets
from discern.data.config import DataConfig
from discern.errors import ConfigError
from discern.model import encoders
from discern.model.config import ModelConfig
from discern.model.encoder import build_embeddings, build_encoder, build_language_head
from discern.model.heads import gather_positions
from discern.model.initialisation import initialise
from discern.model.network import Network
from discern.model.two_stream import Factorization, Remembering
from discern.model.xlnet import XLNetEncoder
from discern.objectives.base import BuildSettings, Evaluator, Objective, Phase
from discern.objectives.config import ObjectiveConfig
from discern.objectives.losses import masked_token_loss
from discern.objectives.memory import SlotMemory
from discern.objectives.metrics import MaskedTokenEvaluator, ratio
from discern.objectives.passes import Pass
from discern.types import CorruptedBatch, LossTerm, StepOutput, TokenBatch


class PermutationLMConfig(ObjectiveConfig):
    """Settings of permutation language modelling. Yang et al. 2019, unless said otherwise."""

    name: str = Field("permutation-lm", description="Objective, by its name in the registry.")
    memory_length: int = Field(
        0,
        ge=0,
        description="Positions of the rows before that each layer remembers of a slot; needs rows of data.packing 'two-part', "
        "which are then read in order. 0: no memory, rows are shuffled. XLNet: 384 for rows of 512.",
    )
    permutation_size: int | None = Field(
        None,
        ge=1,
        description="Positions of a window of the factorization order; windows keep their order from left to right. Must divide "
        "half a row. None: each half is one window. XLNet: 256 for rows of 512, which is half.",
    )
    prediction_ratio: int = Field(
        6,
        ge=2,
        description="One token in so many is predicted. XLNet's K: 6.",
        json_schema_extra={OTHER_NAME: "mask_probability"},
    )
    span_targets: bool = Field(
        True, description="Predict spans of one to five whole words; false: single tokens, the paper's ablation."
    )
    legacy_spans: bool = Field(
        False, description="Choose spans as the released code does: of pieces, not of words, and not evenly over the row."
    )
    next_sentence_weight: float = Field(
        0.0,
        ge=0,
        description="Factor of the loss of telling whether B follows A; 0: not asked. XLNet: 0, as it did no good; the "
        "paper's ablation: 1.",
    )

    @property
    def reads_in_order(self) -> bool:
        return self.memory_length > 0

    def check(self, data: DataConfig, model: ModelConfig) -> None:
        _check_encoder(model)
        if data.packing != "two-part":
            if self.memory_length:
                raise ValueError(
                    f"a memory needs rows that go on from one another, and data.packing '{data.packing}' has none; set "
                    f"data.packing=two-part, or objective.memory_length=0 instead of {self.memory_length}"
                )
            if self.next_sentence_weight:
                raise ValueError(
                    "only data.packing 'two-part' knows whether one segment follows the other; set data.packing=two-part, or "
                    "objective.next_sentence_weight=0"
                )
        part = data.sequence_length // 2 if data.packing == "two-part" else data.sequence_length
        if self.permutation_size is not None and part % self.permutation_size:
            fitting = [size for size in range(1, part + 1) if part % size == 0]
            raise ValueError(
                f"objective.permutation_size {self.permutation_size} does not divide the {part} positions that are permuted "
                f"together at data.sequence_length {data.sequence_length}; set it to one of {fitting}, or to none for all {part}"
            )

    @model_validator(mode="after")
    def _legacy_spans_are_spans(self) -> PermutationLMConfig:
        if self.legacy_spans and not self.span_targets:
            raise ValueError("legacy_spans chooses spans, which span_targets = false leaves out; set one of them only")
        return self


class PermutationLanguageModel(Objective):
    """Predict some tokens in a random order, each from the context and from the targets before it, in both directions.

    The text is not changed: masks decide who sees whom (`blocked_pairs`), and the query stream predicts each target without
    having seen it. With a memory each slot of the batch reads on from row to row, and sees what its rows before left behind.
    In evaluation rows stand alone, without memory, so that figures are those of the rows and comparable with models that have
    none.

    Differs: next-sentence prediction reads a query at [CLS] instead of its content, whose last layer nothing else needs.
    Reference: Yang et al. 2019, sections 2.2 to 2.5.
    """

    Config: ClassVar[type[ObjectiveConfig]] = PermutationLMConfig

    def __init__(self, config: PermutationLMConfig, settings: BuildSettings) -> None:
        super().__init__()
        model = settings.model
        self.config = config
        self.vocabulary = settings.vocabulary
        self._model = model
        try:
            _check_encoder(model)
        except ValueError as problem:
            raise ConfigError(str(problem)) from problem
        embeddings = build_embeddings(settings.vocabulary.size, model.embedding_size, model)
        encoder = build_encoder(embeddings, model, gradient_checkpointing=settings.gradient_checkpointing)
        assert isinstance(encoder, XLNetEncoder)
        self.encoder = encoder
        self.head = build_language_head(embeddings, model)
        self.next_sentence_head = nn.Linear(model.hidden_size, 1) if config.next_sentence_weight else None
        self._memory = SlotMemory((model.num_layers, config.memory_length, model.hidden_size))

    def initialise(self, seed: int) -> None:
        initialise(self, torch.Generator().manual_seed(key_of(seed, "weights")), self._model)

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        choose = single_targets
        if self.config.span_targets:
            choose = legacy_span_targets if self.config.legacy_spans else span_targets
        positions = choose(batch, self.config.prediction_ratio, randomness)
        return CorruptedBatch(
            tokens=batch,
            masked_ids=batch.input_ids,
            masked_positions=positions,
            num_masked=int(positions.sum()),
            num_tokens=int(batch.attention_mask.sum()),
        )

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        counts = {"permutation_lm": batch.num_masked}
        return counts if self.next_sentence_head is None else counts | {"next_sentence": batch.tokens.size}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens = batch.tokens
        positions, valid = self._queries(batch.masked_positions)
        visible = self.visible(batch, randomness)
        queries = positions if self.next_sentence_head is None else F.pad(positions, (0, 1), value=visible.shape[1] - 1)
        remembers = self.training and self.config.memory_length > 0 and tokens.reuse_length > 0
        streams = self.encoder.two_streams(
            tokens.input_ids,
            Factorization(visible, queries),
            tokens.token_type_ids,
            memory=self._memory.read(tokens.slot, tokens.input_ids) if remembers else None,
            is_reversed=tokens.is_reversed,
            remembering=Remembering(tokens.reuse_length, self.config.memory_length) if remembers else None,
        )
        if remembers:
            assert streams.memory is not None
            self._memory.write(tokens.slot, streams.memory)
        logits = self.head(gather_positions(streams.query[:, : positions.shape[1]], valid))
        targets = tokens.input_ids[batch.masked_positions]
        terms = {"permutation_lm": masked_token_loss(logits, targets)}
        observations = {"permutation_lm_logits": logits.detach(), "permutation_lm_targets": targets}
        if self.next_sentence_head is not None:
            follows = self.next_sentence_head(streams.query[:, -1]).squeeze(-1)
            terms["next_sentence"] = self._next_sentence_loss(follows, tokens)
            observations["next_sentence_logits"] = follows.detach()
        return StepOutput(terms, observations)

    def visible(self, batch: CorruptedBatch, randomness: Randomness) -> Bool[Tensor, "B L L"]:
        """True where the query at the position of the row may see the token at that of the column: of its own document only."""
        tokens = batch.tokens
        length, part = tokens.input_ids.shape[1], tokens.reuse_length
        order = factorization_order(length, part, self.config.permutation_size, randomness)
        blocked = blocked_pairs(order, batch.masked_positions, tokens.special_tokens_mask, part)
        seen = ~blocked & tokens.attention_mask[:, None, :]
        documents = tokens.document_ids
        return seen if documents is None else seen & (documents[:, :, None] == documents[:, None, :])

    def _queries(self, targets: Bool[Tensor, "B L"]) -> tuple[Int[Tensor, "B P"], Bool[Tensor, "B P"]]:
        """The targets of each row from left to right, and which of the P places of a row hold one."""
        # The most targets a row can have: to count them would make a GPU wait.
        count = max(1, targets.shape[1] // self.config.prediction_ratio)
        positions = (~targets).long().argsort(dim=1, stable=True)[:, :count]
        return positions, targets.gather(1, positions)

    def _next_sentence_loss(self, logits: Float[Tensor, "B"], tokens: TokenBatch) -> LossTerm:
        if tokens.continues is None:
            raise ConfigError(
                "these rows don't say whether one segment follows the other",
                hint="set data.packing=two-part, or objective.next_sentence_weight=0",
            )
        total = F.binary_cross_entropy_with_logits(logits.float(), tokens.continues.float(), reduction="sum")
        return LossTerm(total, tokens.size, self.config.next_sentence_weight)

    def networks(self) -> dict[str, Network]:
        return {"encoder": Network(self.encoder, self.head)}

    def passes(self, phase: Phase) -> list[Pass]:
        """Content everywhere, queries and head where something is predicted; the query of next-sentence prediction left out."""
        share = 1 / self.config.prediction_ratio
        return [Pass(self.networks()["encoder"], share, query_share=share, remembered=self.config.memory_length)]

    def evaluator(self) -> PermutationLMEvaluator:
        return PermutationLMEvaluator(self.config.next_sentence_weight)

    def initial_loss(self) -> float:
        """ln V, and ln 2 for the question whether B follows A."""
        return math.log(self.vocabulary.size) + self.config.next_sentence_weight * math.log(2)

    def carry_state(self) -> dict[str, Tensor]:
        return self._memory.state()

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:
        self._memory.load(state)


class PermutationLMEvaluator(Evaluator):
    """Loss and accuracy of the targets, and of next-sentence prediction where it is asked, with the share of the rows whose B
    does follow A: who always says the likelier of the two is right that often, or as often as it is not so.

    Args:
        next_sentence_weight: of the objective; 0: not asked.
    """

    def __init__(self, next_sentence_weight: float) -> None:
        self._tokens = MaskedTokenEvaluator("permutation_lm")
        self._weight = next_sentence_weight
        self._loss = 0.0
        self._correct = 0
        self._follows = 0
        self._rows = 0

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        self._tokens.update(output, batch)
        if not self._weight:
            return
        assert batch.tokens.continues is not None
        self._loss += float(output.terms["next_sentence"].total)
        self._correct += int(((output.observations["next_sentence_logits"] > 0) == batch.tokens.continues).sum())
        self._follows += int(batch.tokens.continues.sum())
        self._rows += batch.tokens.size

    def merge(self, other: Evaluator) -> None:
        other = cast(Self, other)
        self._tokens.merge(other._tokens)
        self._loss += other._loss
        self._correct += other._correct
        self._follows += other._follows
        self._rows += other._rows

    def compute(self) -> dict[str, float]:
        figures = self._tokens.compute()
        if not self._weight:
            return figures
        loss = ratio(self._loss, self._rows)
        asked = {
            "next_sentence_loss": loss,
            "next_sentence_accuracy": ratio(self._correct, self._rows),
            "next_sentence_share": ratio(self._follows, self._rows),
        }
        return figures | asked | {"loss": figures["loss"] + self._weight * loss}


def _check_encoder(model: ModelConfig) -> None:
    """Raise a ValueError where the encoder has no query stream."""
    if not issubclass(encoders.load(model.encoder), XLNetEncoder):
        raise ValueError(
            f"objective 'permutation-lm' needs an encoder with a query stream, which model.encoder '{model.encoder}' has not; "
            "set model.encoder=xlnet"
        )
