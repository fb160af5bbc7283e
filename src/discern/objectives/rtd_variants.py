"""Variants."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern.corruption.randomness import Randomness
from discern.corruption.sampling import sample_fixed
from discern.errors import ConfigError
from discern.models.base import Network
from discern.models.config import ModelConfig
from discern.models.heads import MaskedLMHead, ReplacedTokenHead
from discern.models.two_tower import two_tower_generator
from discern.objectives.base import Phase
from discern.objectives.losses import DenseLogits, word_logits
from discern.objectives.masked import sample_replacements
from discern.objectives.metrics import ReplacedTokenEvaluator, SumEvaluator
from discern.objectives.rtd import (
    Algorithm,
    Copy,
    Generator,
    GeneratorInputs,
    GeneratorTerms,
    NetworkGenerator,
    Prediction,
    RTDConfig,
    check_freezing,
    phases_with_freezing,
)
from discern.types import CorruptedBatch, LossTerm, Places, PlacesOf, StepOutput, TokenBatch


class TwoTowerGenerator(NetworkGenerator):
    """Two language models over the clean text, one in each direction: each token is predicted from all the others.

    No [MASK] is needed, so the loss is taken at every maskable position, wherever samples are drawn.

    Reference: Clark et al. 2020 (Electric), section 2.3, and its table of results for "ELECTRA-TT".
    """

    everywhere: ClassVar[bool] = True

    def __init__(self, config: RTDConfig, inputs: GeneratorInputs) -> None:
        super().__init__(config)
        checkpointing = inputs.settings.gradient_checkpointing
        self.network = two_tower_generator(inputs.embeddings, inputs.sizes, gradient_checkpointing=checkpointing)

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        if config.tying == "all":
            raise ValueError(
                "generator 'two-tower' reads the text once in each direction, and a discriminator reads it in both at once, so "
                "they cannot share all weights as tying 'all' asks; set tying = 'embeddings', or generator = 'mlm'"
            )
        if config.algorithm == "two-stage" and config.copy_weights:
            raise ValueError(
                "algorithm 'two-stage' copies the generator into the discriminator, and a 'two-tower' generator is two encoders "
                "that each see one direction; set copy_weights = false, or generator = 'mlm'"
            )

    def count(self, batch: CorruptedBatch) -> int:
        return int(batch.mask("words").sum())

    def reads(self) -> frozenset[PlacesOf]:
        return frozenset({"chosen", "words"})

    def predict(self, batch: CorruptedBatch) -> Prediction:
        tokens, words = batch.tokens, batch.places("words")
        states = words.gather(self.network.encoder(tokens.input_ids, *tokens.context))
        logits, targets, chosen = word_logits(self.head, states), words.gather(tokens.input_ids), batch.places("chosen")
        at = chosen.among(words)
        masked_logits, originals = logits.select(at), targets.index_select(0, at)
        return Prediction(logits, targets, words, masked_logits, chosen, originals, states.index_select(0, at))


class FixedGenerator(Generator):
    """Proposes tokens from one distribution, regardless of the text. It has no weights; its loss is only reported."""

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        what = f"generator '{config.generator}' has no weights"
        if config.tying in ("all", "gradient-disentangled"):
            raise ValueError(f"{what} for tying '{config.tying}' to share; set tying = 'embeddings', or generator = 'mlm'")
        if config.masking == "entropy":
            raise ValueError(
                f"{what}, so its predictions are equally uncertain everywhere, and masking 'entropy' would choose evenly; set "
                "masking = 'uniform', or generator = 'mlm'"
            )
        if config.algorithm != "joint":
            raise ValueError(f"{what} for algorithm '{config.algorithm}' to train; set algorithm = 'joint', or generator = 'mlm'")
        if config.generator_checkpoint is not None:
            raise ValueError(f"{what} to fill from generator_checkpoint; leave that out, or set generator = 'mlm'")
        if config.freeze_generator_at is not None:
            raise ValueError(f"{what} to freeze; leave out freeze_generator_at, or set generator = 'mlm'")
        if config.freeze_discriminator_at is not None:
            raise ValueError(
                f"{what}, so with the discriminator frozen nothing is trained; leave out freeze_discriminator_at, and end the "
                "run by train.max_steps"
            )

    @abc.abstractmethod
    def log_probabilities(self, device: torch.device) -> Float[Tensor, "V"]:
        """The log-probability of each word."""

    def networks(self) -> dict[str, Network]:
        return {}

    def count(self, batch: CorruptedBatch) -> int:
        return batch.num_targets

    def predict(self, batch: CorruptedBatch) -> Prediction:
        chosen = batch.places("chosen")
        originals = chosen.gather(batch.tokens.input_ids)
        logits = DenseLogits(self.log_probabilities(originals.device).expand(len(originals), -1))
        return Prediction(logits, originals, chosen, logits, chosen, originals, None)

    def loss(self, prediction: Prediction, weight: float) -> LossTerm:
        """As for every generator; the logits are log-probabilities already, so no softmax is needed."""
        targets, places = prediction.targets, prediction.places
        losses = -self.log_probabilities(targets.device)[targets]
        return LossTerm(places.weigh(losses).sum(), places.count, weight)

    def sample(self, prediction: Prediction, batch: CorruptedBatch, randomness: Randomness) -> Int[Tensor, "M"]:
        sampling = self.config.sampling_at(randomness.step)
        if sampling.cuts:
            return super().sample(prediction, batch, randomness)
        # One distribution for all positions: no matrix of M x V is needed.
        drawn_from = torch.log_softmax(self.log_probabilities(prediction.targets.device) / sampling.temperature, 0)
        logits = prediction.masked_logits
        return sample_replacements(batch, logits, randomness, lambda _, uniforms: sample_fixed(drawn_from, uniforms))


class UniformGenerator(FixedGenerator):
    """Every word of the vocabulary with equal probability, special tokens included, as in the released code."""

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        super().check(config)
        if config.top_p < 1:
            raise ValueError(
                "generator 'uniform' proposes all words with equal probability, and top_p below 1 would exclude those with the "
                "highest ids; leave out top_p, or set generator = 'unigram'"
            )

    def __init__(self, config: RTDConfig, inputs: GeneratorInputs) -> None:
        super().__init__(config)
        self._size = inputs.settings.vocabulary.size

    def modules(self) -> dict[str, nn.Module]:
        return {}

    def log_probabilities(self, device: torch.device) -> Float[Tensor, "V"]:
        return torch.full((self._size,), -math.log(self._size), device=device)

    def initial_loss(self) -> float:
        """ln V, throughout the training."""
        return math.log(self._size)


class UnigramGenerator(FixedGenerator):
    """Words with their frequencies in the training split; one is added to each count, so that no word is impossible.

    Reference: Clark et al. 2020, section 3.2: the generator "unigram" of figure 3, the weakest there.
    """

    def __init__(self, config: RTDConfig, inputs: GeneratorInputs) -> None:
        super().__init__(config)
        vocabulary = inputs.settings.vocabulary
        self._known = vocabulary.token_counts is not None
        self._table = FrequencyTable(vocabulary.size, vocabulary.token_counts)

    def prepare(self) -> None:
        if not self._known:
            raise ConfigError(
                "generator 'unigram' needs to know how often each word occurs in the training split, but there is no data set",
                hint="give a run or a data set, or set objective.generator = 'mlm'",
            )

    def modules(self) -> dict[str, nn.Module]:
        return {"generator_frequencies": self._table}

    def log_probabilities(self, device: torch.device) -> Float[Tensor, "V"]:
        return self._table.log_probabilities

    def initial_loss(self) -> float:
        """The entropy of the distribution: its mean loss over text with these word frequencies."""
        return float(torch.special.entr(self._table.log_probabilities.double().exp()).sum())


class FrequencyTable(nn.Module):
    """Log-probabilities of words by their counts, each plus one. They are saved with the checkpoint and restored from it.

    Attributes:
        log_probabilities: (V,), float32.
    """

    log_probabilities: Tensor

    def __init__(self, size: int, counts: Int[Tensor, "V"] | None) -> None:
        super().__init__()
        smoothed = torch.ones(size, dtype=torch.float64) if counts is None else counts.double() + 1
        self.register_buffer("log_probabilities", (smoothed / smoothed.sum()).log().float())


class TwoStage(Algorithm):
    """Trains the generator alone, by maximum likelihood; then freezes it and trains the discriminator alone on its samples.

    The two are never trained together, so nothing is shared: when the discriminator starts, it gets a copy of what `tying`
    names, and of the whole encoder with `copy_weights`. Its optimizer starts afresh. With tying 'gradient-disentangled' it
    keeps reading the generator's embeddings, which are now fixed, and learns the difference.

    When a run is extended, the step of the switch stays the same.

    Reference: Clark et al. 2020, section 3.2, figure 3 right ("two-stage").
    """

    apart: ClassVar[bool] = True

    def __init__(self, config: RTDConfig, generator: Generator) -> None:
        super().__init__(config, generator)
        self._switch: int | None = None

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        if config.tying == "all":
            raise ValueError(
                "algorithm 'two-stage' freezes the generator while the discriminator learns, but with tying 'all' they are one "
                "encoder; set tying = 'embeddings' (the discriminator still starts as a copy)"
            )
        if config.copy_weights and (config.generator_size != 1 or config.generator_depth != 1):
            raise ValueError(
                "algorithm 'two-stage' copies the generator's weights into the discriminator, which needs the same sizes, but "
                f"generator_size is {config.generator_size:g} and generator_depth {config.generator_depth:g}; set generator_size "
                "= 1.0 and generator_depth = 1.0, or copy_weights = false for a discriminator with random weights"
            )
        if config.generator_warmup_steps:
            raise ValueError(
                "algorithm 'two-stage' already trains the generator first; leave out generator_warmup_steps, or set "
                "algorithm = 'joint'"
            )
        if config.freeze_generator_at is not None or config.freeze_discriminator_at is not None:
            raise ValueError(
                "algorithm 'two-stage' itself freezes the generator, after two_stage_steps; leave out "
                "freeze_generator_at and freeze_discriminator_at, or set algorithm = 'joint'"
            )

    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        steps = self.config.two_stage_steps
        first = self._switch
        if first is None:
            first = round(steps * max_steps) if steps < 1 else round(steps)
            if not 0 < first < max_steps:
                raise ConfigError(
                    f"objective.two_stage_steps = {steps:g} gives the generator {first} of train.max_steps {max_steps}, "
                    "which leaves none for the discriminator",
                    hint="set objective.two_stage_steps to a fraction like 0.5, or train.max_steps higher",
                )
        self._switch = first
        generator = Phase("generator", min(first, max_steps), frozenset({"generator"}))
        if first >= max_steps:
            return [generator]
        return [generator, Phase("discriminator", max_steps - first, frozenset({"discriminator"}), copy, begins=first)]

    def carry_state(self) -> dict[str, Tensor]:
        return {} if self._switch is None else {"two_stage_switch": torch.tensor([self._switch])}

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:
        if "two_stage_switch" in state:
            self._switch = int(state["two_stage_switch"])


class Adversarial(Algorithm):
    """Trains the generator by REINFORCE to maximize the discriminator's loss at the positions that it fills.

    The reward R of a sample is the discriminator's loss there; its effect on the loss elsewhere is neglected. The
    gradient is E[(R - b) grad log p(sample)], with a learned baseline b = -log sigmoid(w . h) of the generator's state h, whose
    sigmoid is fitted to exp(-R), the probability that the discriminator gave to the right answer, by cross-entropy.

    Terms: 'generator', the cross-entropy of the originals, weight 0, reported to compare with maximum likelihood;
    'adversarial', whose gradient is the above, weight `generator_weight`; 'baseline'. Metric: 'generator_entropy', the entropy
    of the distribution that is sampled from, in nats; it falls far below that of maximum likelihood.

    Differs: the paper does not say whether the baseline's loss trains the generator; here it trains w alone.

    Reference: Clark et al. 2020, appendix F.
    """

    needs_rewards: ClassVar[bool] = True

    def __init__(self, config: RTDConfig, generator: Generator) -> None:
        super().__init__(config, generator)
        assert isinstance(generator, NetworkGenerator)
        head = generator.head
        width = head.dense.in_features if isinstance(head, MaskedLMHead) else head.word_embeddings.embedding_dim
        self._baseline = nn.Linear(width, 1, bias=False)

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        check_freezing(config)
        if config.masking == "with-replacement":
            raise ValueError(
                "algorithm 'adversarial' needs the probability of each sample, and masking 'with-replacement' averages the "
                "samples of a position that it draws twice; set masking = 'uniform'"
            )
        if config.sentence_contrastive_weight > 0:
            raise ValueError(
                "algorithm 'adversarial' rewards each sample by the discriminator's loss, and with "
                "sentence_contrastive_weight above 0 it does not see the samples of texts that stay clean; set "
                "sentence_contrastive_weight = 0, or algorithm = 'joint'"
            )

    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        return phases_with_freezing(self.config, max_steps)

    def modules(self) -> dict[str, nn.Module]:
        return {"generator_baseline": self._baseline}

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return super().counts(batch) | {"adversarial": batch.num_masked, "baseline": batch.num_masked}

    def generator_terms(
        self,
        loss: LossTerm,
        prediction: Prediction,
        sampled_ids: Int[Tensor, "M"],
        rewards: Float[Tensor, "M"] | None,
        step: int,
    ) -> GeneratorTerms:
        assert prediction.states is not None
        assert rewards is not None
        # As one matrix on any device: the gradient needs the distribution that the samples came from, whatever was cut off.
        logits = self.config.sampling_at(step).logits(prediction.masked_logits.matrix(), prediction.originals, sampled_ids)
        drawn_from = torch.log_softmax(logits, -1)
        answers = self._baseline(prediction.states.detach()).squeeze(-1).float()
        baselines = F.softplus(-answers).detach()
        chosen, count = prediction.chosen, prediction.chosen.count
        fit = chosen.weigh(F.binary_cross_entropy_with_logits(answers, torch.exp(-rewards), reduction="none")).sum()
        entropies = torch.special.entr(drawn_from.detach().exp()).sum(-1)
        return GeneratorTerms(
            {
                "generator": replace(loss, total=loss.total.detach(), weight=0.0),
                "adversarial": LossTerm(
                    reinforce_loss(drawn_from, sampled_ids, chosen.weigh(rewards - baselines)), count, loss.weight
                ),
                "baseline": LossTerm(fit, count),
            },
            {"generator_entropy": LossTerm(chosen.weigh(entropies).sum(), count)},
        )

    def initial_loss(self) -> float:
        """ln 2, the baseline's; the surrogate's is 0, as reward and baseline are equal."""
        return math.log(2)


def reinforce_loss(
    log_probabilities: Float[Tensor, "M V"],
    sampled_ids: Int[Tensor, "M"],
    advantages: Float[Tensor, "M"],
) -> Float[Tensor, ""]:
    """A sum whose expected gradient is minus that of the expected reward; its value has no meaning.

    Args:
        log_probabilities: log-probabilities of all words, in the distributions that the samples were drawn from.
        advantages: rewards minus baselines. Baselines that do not depend on the sample leave the expectation as it is; good ones
            reduce the variance.

    Reference: Williams 1992.
    """
    chosen = log_probabilities.gather(1, sampled_ids[:, None]).squeeze(1)
    return -(chosen * advantages.detach()).sum()


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
