"""The sentence-level task of the ELECTRA paper's appendix: whether any token of a text was replaced."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern.corruption.randomness import Randomness
from discern.models.config import ModelConfig
from discern.models.heads import ReplacedTokenHead
from discern.objectives.metrics import ReplacedTokenEvaluator, SumEvaluator
from discern.types import CorruptedBatch, LossTerm, Places, StepOutput, TokenBatch


class SentenceContrast(nn.Module):
    """Classifies a text by the state of its first token: was any of its tokens replaced? Some texts are left unchanged.

    A text is a document piece: a row, or each of the pieces in one. As with tokens, a text whose samples all equal the
    originals counts as clean.

    Args:
        config: sizes of the discriminator.
        clean_probability: fraction of the texts that are left unchanged.

    Reference: Clark et al. 2020, appendix G ("negative results").
    """

    def __init__(self, config: ModelConfig, clean_probability: float) -> None:
        super().__init__()
        self.head = ReplacedTokenHead(config)
        self._clean_probability = clean_probability

    def restore(self, corrupted_ids: Int[Tensor, "B L"], tokens: TokenBatch, randomness: Randomness) -> Int[Tensor, "B L"]:
        """The corrupted ids, with the original ones in the texts that are left unchanged."""
        starts = tokens.text_starts
        draws = randomness.uniforms("clean texts", starts.shape[1])
        texts = starts.long().cumsum(1)  # 1, 2, ... within a row; 0 before the first, in rows of padding
        each = draws.new_ones(len(draws), starts.shape[1] + 1).scatter(1, texts * starts, torch.where(starts, draws, 1.0))
        return torch.where(each.gather(1, texts) < self._clean_probability, tokens.input_ids, corrupted_ids)

    def forward(self, hidden: Float[Tensor, "B L D"], texts: Places) -> Float[Tensor, "S"]:
        """One logit per text, positive meaning *tampered with*, row by row.

        Args:
            texts: the first token of each.
        """
        return self.head(texts.gather(hidden)[None])[0]  # type: ignore[no-any-return]


def is_tampered(is_replaced: Bool[Tensor, "B L"], tokens: TokenBatch, texts: Places) -> Bool[Tensor, "S"]:
    """Whether any token of each text was replaced, row by row."""
    numbers = tokens.text_starts.flatten().long().cumsum(0)  # over the whole batch; tokens before the first text have 0
    replaced = torch.zeros(numbers.numel() + 1, device=numbers.device).index_add(0, numbers, is_replaced.flatten().float())
    return replaced.index_select(0, numbers.index_select(0, texts.index)) > 0


def sentence_loss(logits: Float[Tensor, "S"], tampered: Bool[Tensor, "S"], weight: float) -> LossTerm:
    """Binary cross-entropy of *tampered with* over the texts, summed, in float32."""
    total = F.binary_cross_entropy_with_logits(logits.float(), tampered.float(), reduction="sum")
    return LossTerm(total, logits.shape[0], weight)


class SentenceContrastEvaluator(SumEvaluator):
    """The metrics of replaced token detection, and loss and accuracy over whole texts."""

    def __init__(self, tokens: ReplacedTokenEvaluator, weight: float) -> None:
        self._tokens = tokens
        self._weight = weight
        super().__init__(tokens)

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        self._tokens.update(output, batch)
        logits, tampered = output.observations["sentence_logits"], output.observations["is_tampered"]
        term = output.terms["sentence"]
        self.add(loss=float(term.total.detach()), count=term.count, correct=int(((logits > 0) == tampered).sum()))

    def compute(self) -> dict[str, float]:
        metrics, loss = self._tokens.compute(), self.ratio("loss", "count")
        metrics["loss"] += self._weight * loss
        return metrics | {"sentence_loss": loss, "sentence_accuracy": self.ratio("correct", "count")}
