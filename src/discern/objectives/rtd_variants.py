"""Variants of replaced token detection: other generators, two-stage and adversarial training, and the sentence-level task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern.config.schema import to_step
from discern.corruption.randomness import Randomness
from discern.models.base import Encoder
from discern.models.config import ModelConfig
from discern.models.heads import ReplacedTokenHead, TiedLMHead
from discern.models.two_tower.encoder import two_tower_generator
from discern.objectives.base import Phase
from discern.objectives.losses import DenseLogits, word_logits
from discern.objectives.rtd import Algorithm, Generator, GeneratorInputs, Prediction, Replacement, RTDConfig
from discern.types import CorruptedBatch, LossTerm, Places, TokenBatch


class TwoTowerGenerator(Generator):
    """Two language models over the clean text, one in each direction: each token is predicted from all the others.

    No [MASK] is needed, so the loss is taken at every maskable position, wherever samples are drawn.

    Reference: Clark et al. 2020 (Electric), section 2.3, and its table of results for "ELECTRA-TT".
    """

    learns_at = "words"

    def build(self, inputs: GeneratorInputs) -> tuple[Encoder, TiedLMHead]:
        settings, sizes, embeddings, _ = inputs
        network = two_tower_generator(embeddings, sizes, gradient_checkpointing=settings.gradient_checkpointing)
        return network.encoder, cast(TiedLMHead, network.head)

    def predict(self, batch: CorruptedBatch) -> Prediction:
        tokens, words = batch.tokens, batch.places("words")
        states = words.gather(self.encoder(tokens.input_ids, *tokens.context))
        logits, at = word_logits(self.head, states), batch.places("chosen").among(words)
        return Prediction(logits, words, logits.select(at), states.index_select(0, at))


class FixedGenerator(Generator):
    """Proposes tokens from one distribution, regardless of the text. It has no weights; its loss is only reported.

    'uniform': every word of the vocabulary with equal probability, special tokens included, as in the released code. 'unigram':
    words with their frequencies in the training split; one is added to each count, so that no word is impossible.

    Reference: Clark et al. 2020, section 3.2: the generator "unigram" of figure 3, the weakest there.
    """

    def __init__(self, config: RTDConfig, inputs: GeneratorInputs) -> None:
        self.config, self.vocabulary = config, inputs.settings.vocabulary
        counts, size = self.vocabulary.token_counts, self.vocabulary.size
        smoothed = torch.ones(size, dtype=torch.float64)
        if config.generator == "unigram" and counts is not None:
            smoothed += counts
        self.table: Any = nn.Module()
        log_probabilities = (smoothed / smoothed.sum()).log().float()
        self.table.register_buffer("log_probabilities", log_probabilities, persistent=config.generator == "unigram")
        self.networks, self.modules = {}, {"generator_frequencies": self.table}

    def predict(self, batch: CorruptedBatch) -> Prediction:
        chosen = batch.places("chosen")
        logits = DenseLogits(self.table.log_probabilities.expand(len(chosen.index), -1))
        return Prediction(logits, chosen, logits, None)


class TwoStage(Algorithm):
    """Trains the generator alone, by maximum likelihood; then freezes it and trains the discriminator alone on its samples.

    The two are never trained together, so nothing is shared: when the discriminator starts, it gets a copy of what `tying`
    names, and of the whole encoder with `copy_weights`. Its optimizer starts afresh. With tying 'gradient-disentangled' it
    keeps reading the generator's embeddings, which are now fixed, and learns the difference.

    Reference: Clark et al. 2020, section 3.2, figure 3 right ("two-stage").
    """

    trains_separately = True

    def phases(self, max_steps: int, copy: Callable[[], None]) -> list[Phase]:
        # Beyond the end only in a run that was shortened
        first = min(to_step(self.config.two_stage_steps, max_steps), max_steps)
        generator = Phase("generator", first, frozenset({"generator"}))
        if first == max_steps:
            return [generator]
        return [generator, Phase("discriminator", max_steps - first, frozenset({"discriminator"}), copy, begins=first)]


class Adversarial(Algorithm):
    """Trains the generator by REINFORCE to maximize the discriminator's loss at the positions that it fills.

    The reward R of a sample is the discriminator's loss there; its effect on the loss elsewhere is neglected. The
    gradient is E[(R - b) grad log p(sample)], with a learned baseline b = -log sigmoid(w . h) of the generator's state h, whose
    sigmoid is fitted to exp(-R), the probability that the discriminator gave to the right answer, by cross-entropy.

    Terms: 'generator', the cross-entropy of the originals, weight 0, reported to compare with maximum likelihood;
    'adversarial', whose gradient is the above, weight `generator_weight`; 'baseline'. Metric: 'generator_entropy', the entropy
    of the distribution that is sampled from, in nats; it falls far below that of maximum likelihood.

    Differs: the paper does not say whether the baseline's loss trains the generator; here it trains w alone.

    Reference: Clark et al. 2020, appendix F; Williams 1992.
    """

    needs_rewards = True

    def __init__(self, config: RTDConfig, generator: Generator) -> None:
        super().__init__(config, generator)
        self._baseline = nn.Linear(generator.head.input_size, 1, bias=False)
        self.modules = {"generator_baseline": self._baseline}

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return super().counts(batch) | dict.fromkeys(("adversarial", "baseline", "generator_entropy"), batch.num_masked)

    def generator_terms(
        self, replaced: Replacement, chosen: Places, rewards: Float[Tensor, "M"] | None, step: int
    ) -> tuple[dict[str, LossTerm], dict[str, LossTerm]]:
        prediction, term, count = replaced.prediction, replaced.term, chosen.count
        originals, sampled_ids = (replaced.observations[name] for name in ("sampled_targets", "sampled_ids"))
        assert prediction.states is not None
        assert rewards is not None
        # As one matrix on any device: the gradient needs the distribution that the samples came from, whatever was cut off.
        logits = self.config.sampling_at(step).logits(prediction.chosen_logits.matrix(), originals, sampled_ids)
        drawn_from = logits.log_softmax(-1)
        sampled = drawn_from.gather(1, sampled_ids[:, None]).squeeze(1)
        answers = self._baseline(prediction.states.detach()).squeeze(-1).float()
        # A sum whose gradient is minus that of the expected reward; its value has no meaning.
        surrogate = -(sampled * chosen.weigh(rewards - F.softplus(-answers).detach())).sum()
        fit = chosen.weigh(F.binary_cross_entropy_with_logits(answers, torch.exp(-rewards), reduction="none")).sum()
        entropies = torch.special.entr(drawn_from.detach().exp()).sum(-1)
        terms = {
            "generator": replace(term, total=term.total.detach(), weight=0.0),
            "adversarial": LossTerm(surrogate, count, term.weight),
            "baseline": LossTerm(fit, count),
        }
        return terms, {"generator_entropy": LossTerm(chosen.weigh(entropies).sum(), count)}


class SentenceContrast(nn.Module):
    """Classifies a text by the state of its first token: was any of its tokens replaced? Some texts are left unchanged.

    A text is a document piece: a row, or each of the pieces in one. As with tokens, a text whose samples all equal the
    originals counts as clean.

    Args:
        config: sizes of the discriminator.
        clean_probability: fraction of the texts that are left unchanged.
        weight: factor of the loss.

    Reference: Clark et al. 2020, appendix G ("negative results").
    """

    def __init__(self, config: ModelConfig, clean_probability: float, weight: float) -> None:
        super().__init__()
        self.head = ReplacedTokenHead(config)
        self._clean_probability, self._weight = clean_probability, weight

    def restore(self, corrupted_ids: Int[Tensor, "B L"], tokens: TokenBatch, randomness: Randomness) -> Int[Tensor, "B L"]:
        """The corrupted ids, with the original ones in the texts that are left unchanged."""
        starts = tokens.text_starts
        draws = randomness.uniforms("clean texts", starts.shape[1])
        texts = starts.long().cumsum(1)  # 1, 2, ... within a row; 0 before the first, in rows of padding
        by_text = draws.new_ones(len(draws), starts.shape[1] + 1).scatter(1, texts * starts, torch.where(starts, draws, 1.0))
        return torch.where(by_text.gather(1, texts) < self._clean_probability, tokens.input_ids, corrupted_ids)

    def loss(
        self, hidden: Float[Tensor, "B L D"], is_replaced: Bool[Tensor, "B L"], tokens: TokenBatch, texts: Places
    ) -> tuple[LossTerm, dict[str, Tensor]]:
        """Binary cross-entropy of *tampered with* over the S texts, summed, in float32, and its logits and labels, (S,).

        Args:
            texts: the first token of each text.
        """
        logits = self.head(texts.gather(hidden)[None])[0]
        numbers = tokens.text_starts.flatten().long().cumsum(0)  # over the whole batch; tokens before the first text have 0
        replaced = torch.zeros(numbers.numel() + 1, device=numbers.device).index_add(0, numbers, is_replaced.flatten().float())
        tampered = replaced.index_select(0, numbers.index_select(0, texts.index)) > 0
        total = F.binary_cross_entropy_with_logits(logits.float(), tampered.float(), reduction="sum")
        observations = {"sentence_logits": logits.detach(), "is_tampered": tampered}
        return LossTerm(total, logits.shape[0], self._weight), observations
