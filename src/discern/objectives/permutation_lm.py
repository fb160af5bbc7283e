"""Permutation language modeling: XLNet's objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from discern.config.schema import OTHER_NAME
from discern.corruption.permutation import blocked_pairs, factorization_order, legacy_span_targets, single_targets, span_targets
from discern.corruption.randomness import Randomness
from discern.data.config import DataConfig
from discern.models import encoders
from discern.models.base import Network, build_embeddings, build_encoder
from discern.models.config import ModelConfig
from discern.models.two_stream import Factorization, Remembering
from discern.objectives.base import BuildSettings, Evaluator, ForwardPass, Phase, PretrainingObjective, WordTargets
from discern.objectives.config import ObjectiveConfig
from discern.objectives.losses import word_logits
from discern.objectives.masked import corrupted_batch
from discern.objectives.metrics import MetricsEvaluator, Ratios, masked_metrics
from discern.types import CorruptedBatch, LossTerm, Places, StepOutput, TokenBatch

_MEMORY_NAME = "memory.slot"


class PermutationLMConfig(ObjectiveConfig):
    """Settings of permutation language modeling. Yang et al. 2019, unless said otherwise."""

    permutes: ClassVar[bool] = True
    name: str = Field("permutation-lm", description="Objective, by its name in the registry.")
    memory_length: int = Field(
        0,
        ge=0,
        description="Positions of earlier rows of a slot that each layer remembers; needs rows of data.packing 'two-part', "
        "which are then read in order. 0: no memory, rows are shuffled. XLNet: 384 for rows of 512.",
    )
    permutation_size: int | None = Field(
        None,
        ge=1,
        description="Positions per window of the factorization order; windows keep their order from left to right. Must divide "
        "half a row. None: each half is one window. XLNet: 256 for rows of 512, which is half.",
    )
    prediction_ratio: int = Field(
        6,
        ge=2,
        description="One in this many tokens is predicted. XLNet's K: 6.",
        json_schema_extra={OTHER_NAME: "mask_probability"},
    )
    span_targets: bool = Field(
        True, description="Predict spans of one to five whole words; false: single tokens, the paper's ablation."
    )
    legacy_spans: bool = Field(
        False, description="Choose spans as the released code does: spans of word pieces, not evenly distributed over the row."
    )
    next_sentence_weight: float = Field(
        0.0,
        ge=0,
        description="Factor of the next-sentence loss, for predicting whether segment B follows segment A; 0: no such loss. "
        "XLNet: 0, as it did not help; the paper's ablation: 1.",
    )

    @property
    def reads_in_order(self) -> bool:
        return self.memory_length > 0

    def check(self, data: DataConfig, model: ModelConfig) -> None:
        if not cast(Any, encoders.load(model.encoder)).has_query_stream:
            raise ValueError(
                f"objective '{self.name}' needs an encoder with a query stream, unlike model.encoder '{model.encoder}'; set "
                "model.encoder=xlnet"
            )
        if data.packing != "two-part":
            if self.memory_length:
                raise ValueError(
                    f"a memory needs rows that continue each other, unlike those of data.packing '{data.packing}'; set "
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


class PermutationLanguageModel(PretrainingObjective[PermutationLMConfig]):
    """Predict some tokens in a random order, each from the context and from the targets before it, in both directions.

    The text is not changed: masks decide which position attends to which (`blocked_pairs`), and the query stream predicts each
    target without having seen it. With a memory, each slot of the batch continues its text from row to row and attends to the
    states of its earlier rows. Evaluation uses no memory, so that the metrics do not depend on other rows and are comparable
    with those of models without one.

    Differs: next-sentence prediction reads a query at [CLS] instead of its content, whose last layer is not needed otherwise.
    Reference: Yang et al. 2019, sections 2.2 to 2.5.
    """

    Config = PermutationLMConfig

    def __init__(self, config: PermutationLMConfig, settings: BuildSettings) -> None:
        super().__init__(config, settings)
        model = settings.model
        embeddings = build_embeddings(settings.vocabulary.size, model.embedding_size, model)
        encoder = build_encoder(embeddings, model, gradient_checkpointing=settings.gradient_checkpointing)
        self.encoder: Any = encoder  # with a query stream, see `PermutationLMConfig.check`
        self.head = encoder.language_head()
        self.next_sentence_head = nn.Linear(model.hidden_size, 1) if config.next_sentence_weight else None
        # The memories of the slots: layers, positions and width; and those that were loaded and not used so far.
        self._memory_shape = model.num_layers, config.memory_length, model.hidden_size
        self._memories: dict[int, Tensor] = {}
        self._loaded: dict[int, Tensor] = {}

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        choose = single_targets
        if self.config.span_targets:
            choose = legacy_span_targets if self.config.legacy_spans else span_targets
        return corrupted_batch(batch, choose(batch, self.config.prediction_ratio, randomness))

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        counts = {"permutation_lm": batch.num_masked}
        return counts if self.next_sentence_head is None else counts | {"next_sentence": batch.tokens.size}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens = batch.tokens
        chosen = batch.places("chosen")
        positions, valid = self._queries(batch, chosen)
        visible = self.visible(batch, randomness)
        queries = positions if self.next_sentence_head is None else F.pad(positions, (0, 1), value=visible.shape[1] - 1)
        remembers = self.training and self.config.memory_length > 0 and tokens.reuse_length > 0
        streams = self.encoder.two_streams(
            tokens.input_ids,
            Factorization(visible, queries),
            tokens.token_type_ids,
            memory=self._memory_of(tokens.slot, tokens.input_ids.device) if remembers else None,
            is_reversed=tokens.is_reversed,
            remembering=Remembering(tokens.reuse_length, self.config.memory_length) if remembers else None,
        )
        if remembers:
            assert streams.memory is not None
            slots = tokens.slot.tolist()
            if not self._memories.keys().isdisjoint(slots):
                # The second step after loading: loaded memories that this rank has not used by now belong to other ranks.
                self._loaded = {}
            for slot in slots:
                self._loaded.pop(slot, None)
            # A copy: the memory is an output of the network, which a CUDA graph would overwrite in its next step.
            self._memories.update(zip(slots, streams.memory.detach().clone().unbind(1), strict=True))
        states = streams.query[:, : positions.shape[1]]
        logits = word_logits(self.head, states.flatten(0, 1) if valid is None else valid.gather(states))
        targets = chosen.gather(tokens.input_ids)
        terms = {"permutation_lm": logits.loss(targets, chosen)}
        observations = {**logits.observed("permutation_lm"), "permutation_lm_targets": targets}
        if self.next_sentence_head is not None:
            follows = self.next_sentence_head(streams.query[:, -1]).squeeze(-1)
            assert tokens.continues is not None
            total = F.binary_cross_entropy_with_logits(follows.float(), tokens.continues.float(), reduction="sum")
            terms["next_sentence"] = LossTerm(total, tokens.size, self.config.next_sentence_weight)
            observations["next_sentence_logits"] = follows.detach()
        return StepOutput(terms, observations)

    def _memory_of(self, slots: Int[Tensor, "B"], device: torch.device) -> Float[Tensor, "N B M D"]:
        """The memories of the given slots.

        A new slot starts with zeros, which are attended to: the released code does so, and without them the model would differ
        between its first and later rows.

        Reference: Dai et al. 2019 (Transformer-XL), section 3.2; zihangdai/xlnet, train.py, `initialize_mems`.
        """
        empty = torch.zeros(self._memory_shape, device=device)
        memories = (self._loaded | self._memories).get
        return torch.stack([memories(slot, empty).to(device, non_blocking=True) for slot in slots.tolist()], 1)

    def visible(self, batch: CorruptedBatch, randomness: Randomness) -> Bool[Tensor, "B L L"]:
        """Whether the query at the row's position may see the token at the column's position, within its own document only."""
        tokens = batch.tokens
        length, part = tokens.input_ids.shape[1], tokens.reuse_length
        order = factorization_order(length, part, self.config.permutation_size, randomness)
        blocked = blocked_pairs(order, batch.masked_positions, tokens.special_tokens_mask, part)
        seen = ~blocked & tokens.attention_mask[:, None, :]
        documents = tokens.document_ids
        return seen if documents is None else seen & (documents[:, :, None] == documents[:, None, :])

    def _queries(self, batch: CorruptedBatch, chosen: Places) -> tuple[Int[Tensor, "B P"], Places | None]:
        """The target positions of each row from left to right, and which of the B * P entries are valid; None: all."""
        rows, length = batch.masked_positions.shape
        if chosen.even:
            return (chosen.index % length).view(rows, -1), None
        # The largest possible number of targets in a row.
        count = max(1, length // self.config.prediction_ratio)
        positions = (~batch.masked_positions).long().argsort(dim=1, stable=True)[:, :count]
        return positions, Places.of(batch.masked_positions.gather(1, positions))

    def networks(self) -> dict[str, Network]:
        return {"encoder": Network(self.encoder, self.head)}

    def forward_passes(self, phase: Phase) -> list[ForwardPass]:
        """Content everywhere, queries and head at the targets; the query of next-sentence prediction is left out."""
        share = 1 / self.config.prediction_ratio
        return [ForwardPass(self.networks()["encoder"], share, query_share=share, remembered=self.config.memory_length)]

    def evaluator(self) -> Evaluator:
        return MetricsEvaluator(_metrics, {"permutation_lm_loss": 1.0, "next_sentence_loss": self.config.next_sentence_weight})

    def word_targets(self) -> WordTargets:
        return WordTargets("permutation_lm_loss", self.vocabulary)

    def carry_state(self) -> dict[str, Tensor]:
        """The memories of this rank's slots by name, on the CPU; before its first step, those that were loaded."""
        memories = self._memories or self._loaded
        return {f"{_MEMORY_NAME}{slot}": memory.cpu().contiguous() for slot, memory in sorted(memories.items())}

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:
        """Every rank loads all slots, as their assignment to ranks may have changed."""
        self._memories = {}
        self._loaded = {int(name.removeprefix(_MEMORY_NAME)): tensor for name, tensor in state.items()}

    def reset_memory(self) -> None:
        self.load_carry_state({})


def _metrics(output: StepOutput, batch: CorruptedBatch) -> tuple[Ratios, None]:
    """Loss and accuracy of the targets, and of next-sentence prediction if it is part of the loss.

    `next_sentence_share` is the fraction of the rows whose B follows A: always giving the more frequent answer has that
    accuracy, or 1 minus it.
    """
    ratios, rows, follows = masked_metrics("permutation_lm", output), batch.tokens.size, batch.tokens.continues
    if follows is not None and "next_sentence" in output.terms:
        answers = output.observations["next_sentence_logits"] > 0
        ratios |= {
            "next_sentence_loss": (output.terms["next_sentence"].total, rows),
            "next_sentence_accuracy": ((answers == follows).sum(), rows),
            "next_sentence_share": (follows.sum(), rows),
        }
    return ratios, None
