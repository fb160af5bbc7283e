"""Diagnosis of a run from its metrics: the usual range of each, the likely cause of an unusual value and the setting to change.

The ranges and their origin: docs/howto/doctor.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from discern.models.electra.encoder import BertEncoder
from discern.objectives.base import Objective, Vocabulary, WordTargets
from discern.parsing import is_number
from discern.types import StepOutput

if TYPE_CHECKING:
    from discern.training.config import TrainConfig

Verdict = Literal["fine", "low", "high", "unknown"]
Settings = Mapping[str, Any]
"""Settings of a run by dotted key; empty if unknown, and then all advice is given."""

# A generator is strong if its samples equal the original this often (the authors, about their released models) ...
_STRONG_SAMPLES = 0.6
# ... With word frequencies alone, 0.006 of the samples do; 0.04 and more once a generator has begun to learn.
_WEAK_SAMPLES = 0.02
# A discriminator that answers "original" everywhere: 0.000; one that learns: 0.045 and more.
_LEAST_RECALL = 0.02
# Adversarial training has a surrogate loss, whose value has no meaning; its gradient is the generator's.
_SURROGATE = "adversarial"
USUAL_WEIGHTS = (1.0, 50.0)  # of the losses of generator and discriminator
# Networks that learn showed it within 1,400 steps (docs/howto/doctor.md); a run of fewer steps is diagnosed after a tenth of it.
_EARLY_STEPS = 1000
_OF_PROGRESS = ("replaced_fraction", "discriminator_recall", "discriminator_auc", "embedding_norm_drift")
_OF_PROGRESS_ENDINGS = ("_gain", "_loss_share")

# Pieces of advice: a text, or settings to change with their new values.
Advice = str | Mapping[str, object]
_LONGER, _LOWER_RATE = "longer training", "a lower optimizer.learning_rate"
_LOCAL_START: Advice = {"model.initialization": "local"}
_SMALL_NETWORK: Advice = {
    "model.initialization": "local",
    "objective.tying": "gradient-disentangled",
    "objective.discriminator_head": "bilinear",
}


def advise(settings: Settings, *advice: Advice) -> str:
    """The advice that applies, the most promising first, without settings that are already set or that the objective lacks."""
    given = []
    for piece in advice:
        if isinstance(piece, str):
            given.append(piece)
            continue
        missing = [f"{key} = {value!r}" for key, value in piece.items() if not settings or settings.get(key, value) != value]
        if missing:
            listed = " and ".join([*filter(None, [", ".join(missing[:-1])]), missing[-1]])
            given.append(f"for small networks {listed}" + (" (as preset cpu-small)" if len(piece) > 1 else ""))
    return "; ".join(given)


@dataclass(frozen=True)
class Finding:
    """One metric with its interpretation.

    Attributes:
        name: as in the metrics log, if the log has it.
        value: None if unavailable; `cause` then gives the reason.
        usual: lowest and highest usual value; None if unknown.
        verdict: where the value lies.
        cause: the meaning of the value, or its most likely cause.
        knob: what to change; "" if nothing needs to change.
    """

    name: str
    value: float | None
    usual: tuple[float, float] | None
    verdict: Verdict
    cause: str
    knob: str = ""


def finding_in_range(
    name: str,
    value: float,
    usual: tuple[float, float],
    *,
    fine: str,
    low: tuple[str, str] = ("", ""),
    high: tuple[str, str] = ("", ""),
) -> Finding:
    """A finding about a value, judged by its usual range.

    Args:
        fine: the meaning of a value inside the range.
        low: cause and knob below the range.
        high: cause and knob above it.
    """
    if value < usual[0]:
        return Finding(name, value, usual, "low", *low)
    if value > usual[1]:
        return Finding(name, value, usual, "high", *high)
    return Finding(name, value, usual, "fine", fine)


def unusual_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The findings whose values are outside their usual range."""
    return [finding for finding in findings if finding.verdict in ("low", "high")]


def warning_of(finding: Finding) -> str:
    """The warning about a finding, on one line."""
    knob = f"; try {finding.knob}" if finding.knob else ""
    return f"warning: {finding.name} {finding.value:.4f} is {finding.verdict}: {finding.cause}{knob}"


# ---- what is usual for an objective ----


@dataclass(frozen=True)
class WordPrediction:
    """The loss of guessing words by their frequencies, which an encoder that predicts words has to beat.

    Attributes:
        targets: how the words that the encoder predicts are chosen.
        entropy: entropy of the word frequencies, in nats.
        doubt: entropy of the original word given the visible one, in nats; None: it follows from `targets.correct`, as nothing
            is known about how the wrong words are chosen.
        advice: what helps an encoder that does not beat it.
    """

    targets: WordTargets
    entropy: float
    doubt: float | None = None
    advice: tuple[Advice, ...] = (_LONGER,)

    def loss_without_context(self, correct: float) -> float:
        """The loss of the best guess from the word frequencies and the visible word alone, in nats."""
        doubt, shown = self.doubt, self.targets.shown
        if doubt is None:
            doubt = (1 - correct) * self.entropy - sum(share * math.log(share) for share in (correct, 1 - correct) if share > 0)
        return (1 - shown) * self.entropy + shown * doubt


@dataclass(frozen=True)
class Expectations:
    """The expected metrics of an objective.

    Attributes:
        generator_learns: whether the generator has weights; otherwise its strength is a choice.
        detects_every_token: whether the discriminator classifies every token as original or replaced. At the chosen positions
            alone, most of which were replaced, 'replaced' is the easy answer; an energy model at its best answers 'original'.
        weights: of the losses 'generator' and 'discriminator', if the loss is their sum with constant weights.
        discriminator_from: step at which the discriminator begins to learn.
        words: the baseline loss of an encoder that predicts words at the chosen positions; None for other encoders.
        settings: settings of the run by dotted key, so that advice leaves out what is already set; empty if unknown.
    """

    generator_learns: bool = True
    detects_every_token: bool = True
    weights: tuple[float, float] | None = None
    discriminator_from: int = 0
    words: WordPrediction | None = None
    settings: Settings = field(default_factory=dict)


def expectations(objective: Objective, max_steps: int, settings: Settings | None = None) -> Expectations:
    """The expectations for an objective as it is trained.

    Args:
        settings: settings of the run by dotted key.
    """
    begins, first = max_steps, 0
    for phase in objective.phases(max_steps):
        if (phase.trains is None or "discriminator" in phase.trains) and "discriminator" not in phase.holds:
            begins = min(begins, first)
        first += phase.steps
    return Expectations(
        generator_learns="generator" in objective.networks(),
        detects_every_token=objective.Config.detects_every_token,
        weights=objective.loss_weights(),
        discriminator_from=begins,
        words=_word_prediction(objective),
        settings=settings or {},
    )


def _word_prediction(objective: Objective) -> WordPrediction | None:
    """The loss that an objective's encoder has to beat; None if it predicts no words, or word frequencies are unknown."""
    targets = objective.word_targets()
    if targets is None or targets.vocabulary.token_counts is None:
        return None
    vocabulary: Vocabulary = targets.vocabulary
    counts = targets.vocabulary.token_counts.double().clone()
    special = vocabulary.special
    counts[[special.pad, special.cls, special.sep, special.mask]] = 0  # never predicted
    if not bool(counts.any()):
        return None
    frequencies = counts / counts.sum()
    advice: list[Advice] = [_LONGER]
    if isinstance(next(iter(objective.networks().values())).encoder, BertEncoder):
        advice.append(_LOCAL_START)
    if targets.hides_all:
        advice.append("objective.mask_token_probability = 0.85, which leaves some of the chosen words visible")
    doubt = None if targets.correct is None else doubt_at_shown_words(frequencies, targets.correct)
    return WordPrediction(targets, float(torch.special.entr(frequencies).sum()), doubt, tuple(advice))


def doubt_at_shown_words(frequencies: Float[Tensor, "V"], correct: float) -> float:
    """Entropy of the original word given the visible word and how it was chosen, in nats.

    The visible word is the original with probability `correct`, else any of the V entries with equal probability. A frequent
    word is therefore almost certainly the original, and a rare one almost certainly not, which is more informative than `correct`
    alone: this conditional entropy is the lowest loss that can be reached without context.

    Args:
        frequencies: relative frequencies of the original words; they sum to 1.
        correct: fraction of the positions with a visible word at which it is the original.
    """
    random = (1 - correct) / len(frequencies)
    same = correct * frequencies + random * frequencies  # P(original = visible = this word)
    seen = correct * frequencies + random
    entropy = torch.special.entr(frequencies)
    # For the originals w other than the visible word: the sum of -random p(w) log(random p(w)).
    others = random * (entropy.sum() - entropy) - torch.special.xlogy(random * (1 - frequencies), random)
    return float((torch.special.entr(same) + others - torch.special.entr(seen)).sum())


# ---- metrics of a run ----


def diagnose_metrics(metrics: Mapping[str, float], expected: Expectations) -> list[Finding]:
    """Findings about generator and discriminator, for the held-out metrics that are given."""
    findings, settings = [], expected.settings
    replaced, sampled = metrics.get("replaced_fraction"), metrics.get("sampled_accuracy")
    if expected.generator_learns and replaced is not None and sampled is not None and sampled < 1:
        chosen = replaced / (1 - sampled)  # fraction of the tokens that were masked
        larger = () if settings.get("objective.generator_size") == 1.0 else ("a larger objective.generator_size",)
        findings.append(
            finding_in_range(
                "replaced_fraction",
                replaced,
                (chosen * (1 - _STRONG_SAMPLES), chosen * (1 - _WEAK_SAMPLES)),
                fine=f"the generator's samples are neither always right nor always wrong: {sampled:.3f} of them equal the "
                "original token",
                low=(
                    "the generator is too strong: most of its samples equal the original, so the discriminator sees few "
                    "replaced tokens",
                    "a smaller objective.generator_size, or a larger objective.mask_probability (the paper's large model: 0.25)",
                ),
                high=(
                    "the generator is weak: hardly any sample equals the original, as it has learned little but word frequencies",
                    advise(settings, _LONGER, _LOCAL_START, *larger),
                ),
            )
        )
    recall, auc = metrics.get("discriminator_recall"), metrics.get("discriminator_auc")
    if recall is not None and not expected.detects_every_token:
        cause = "fraction of the replaced tokens that are detected; a usual range is known for objective 'rtd' only"
        findings.append(Finding("discriminator_recall", recall, None, "unknown", cause))
    elif recall is not None:
        findings.append(
            finding_in_range(
                "discriminator_recall",
                recall,
                (_LEAST_RECALL, 1.0),
                fine="the discriminator detects some of the replaced tokens",
                low=(
                    f"the discriminator predicts 'original' everywhere (AUC {auc or 0.0:.2f}; 0.5 is guessing): this is usual "
                    "early in a run; otherwise the learning rate is too high, or the network too small to learn",
                    advise(settings, _LOWER_RATE, _SMALL_NETWORK),
                ),
            )
        )
    if auc is not None and expected.detects_every_token and (recall or 0.0) >= _LEAST_RECALL:
        findings.append(
            finding_in_range(
                "discriminator_auc",
                auc,
                # Guessing: 0.50; runs whose discriminator did not begin to learn: 0.54 and 0.548; those that did: 0.57 and more.
                (0.55, 1.0),
                fine="the discriminator tells replaced tokens from original ones better than by guessing, which is 0.5",
                low=(
                    "the discriminator marks tokens hardly better than by guessing, which is 0.5; this is usual early in a run; "
                    "otherwise the learning rate is too low or too high, or the network too small",
                    advise(settings, "another optimizer.learning_rate", _LONGER, _SMALL_NETWORK),
                ),
            )
        )
    words = expected.words
    if words is not None and (loss := metrics.get(words.targets.metric)) is not None:
        correct = metrics.get("sampled_accuracy") if words.targets.correct is None else words.targets.correct
        if correct is not None:
            blind = words.loss_without_context(correct)
            compared = f"{loss:.2f} nats; the word frequencies alone would give {blind:.2f}"
            findings.append(
                finding_in_range(
                    words.targets.metric.removesuffix("_loss") + "_gain",
                    blind - loss,
                    # nats; measured: -0.05 and -0.04 in runs that learned only the word frequencies, 0.22 in an mlm run that
                    # learned more
                    (0.1, math.inf),
                    fine=f"the network uses the context: {compared}",
                    low=(
                        f"the network predicts words {'hardly' if loss < blind else 'no'} better than word frequencies would: "
                        f"{compared}; this is usual early in a run; later, it means that the network is too small to start "
                        "learning",
                        advise(settings, *words.advice),
                    ),
                )
            )
    return findings


def diagnose_duplicates(documents: int, duplicates: int) -> list[Finding]:
    """The fraction of a data set's documents that repeat another one."""
    if not documents:
        return []
    return [
        finding_in_range(
            "duplicate_fraction",
            duplicates / documents,
            (0.0, 0.14),  # the most repetitive of four common corpora
            fine="fraction of the documents with exactly the text of an earlier one",
            high=(
                "the text is repetitive: the networks memorize it, and held-out documents may also be in the training text",
                "removing the repeated documents and running `discern prepare` again",
            ),
        )
    ]


@torch.no_grad()
def embedding_norm(objective: Objective) -> float:
    """Mean norm of the word embeddings."""
    return float(_word_embeddings(objective).norm(dim=1).mean())


def _word_embeddings(objective: Objective) -> Tensor:
    """(V, E) the word embeddings that the networks share, or the first network's."""
    weights: Tensor = next(iter(objective.networks().values())).encoder.embeddings.weights
    return weights


def diagnose_drift(now: float, before: float, settings: Settings | None = None) -> Finding:
    """`embedding_norm` as a multiple of its value at the start."""
    return finding_in_range(
        "embedding_norm_drift",
        now / before,
        (0.0, 3.0),  # measured: 1.1 to 1.4 in runs that learn, 3.3 to 3.8 in runs that learn only the word frequencies
        fine="norm of the word embeddings, as a multiple of its value at the start",
        high=(
            "the word embeddings have grown far beyond their initial norm, as in networks that learn only word frequencies, "
            "or with too high a learning rate",
            advise(settings or {}, "a larger model.initializer_range", _LOCAL_START, _LOWER_RATE),
        ),
    )


def _discriminator_share(share: float) -> Finding:
    return finding_in_range(
        "discriminator_loss_share",
        share,
        (0.7, 0.9),  # at the first step 0.77, on the unigram plateau 0.74, with a good generator 0.87
        fine="as usual for the weights 1 and 50",
        low=("the generator's loss dominates: the discriminator has an easy task", "a larger objective.generator_size"),
        high=("the discriminator's loss dominates: the generator learns too little", "objective.discriminator_weight"),
    )


def diagnose_loss_shares(output: StepOutput, expected: Expectations) -> list[Finding]:
    """The share of each weighted term in the loss of a batch, without a surrogate."""
    parts = {
        name: term.weight * float(term.total.detach()) / max(term.count, 1)
        for name, term in output.terms.items()
        if name != _SURROGATE
    }
    whole = sum(parts.values())
    if len(parts) < 2 or whole <= 0:
        return []
    return [
        _discriminator_share(part / whole)
        if name == "discriminator" and expected.weights == USUAL_WEIGHTS
        else Finding(
            f"{name}_loss_share", part / whole, None, "unknown", "share of the weighted loss", f"objective.{name}_weight"
        )
        for name, part in parts.items()
    ]


def embedding_gradients(objective: Objective, output: StepOutput) -> dict[str, Tensor]:
    """The gradient of each weighted term with respect to the word embeddings, (V, E) by name; terms without one are left out.

    Args:
        output: of a forward pass with gradient.
    """
    table, gradients = _word_embeddings(objective), {}
    for name, term in output.terms.items():
        if term.total.requires_grad:  # not for a generator without weights, or a term that is only reported
            loss = term.total * (term.weight / max(term.count, 1))
            (gradient,) = torch.autograd.grad(loss, [table], retain_graph=True, allow_unused=True)
            if gradient is not None and bool(gradient.any()):
                gradients[name] = gradient
    return gradients


def diagnose_gradients(gradients: Mapping[str, Tensor]) -> list[Finding]:
    """Cosine of the generator's gradient and that of the other terms, if both train the same word embeddings; ratio of norms."""
    cosine = "embedding_gradient_cosine"
    of_generator = [gradient for term, gradient in gradients.items() if term in ("generator", _SURROGATE)]
    of_others = [gradient for term, gradient in gradients.items() if term not in ("generator", _SURROGATE)]
    if not of_generator or not of_others:
        senders = " and ".join(gradients) or "nothing"
        return [Finding(cosine, None, None, "unknown", f"only {senders} trains the shared word embeddings: there is no conflict")]
    generator, others = torch.stack(of_generator).sum(0), torch.stack(of_others).sum(0)
    cause = "norm of the other terms' gradient, as a multiple of the generator's: which network dominates the shared embeddings"
    knob = "objective.discriminator_weight, or objective.tying"
    return [
        finding_in_range(
            cosine,
            float(torch.cosine_similarity(generator.flatten(), others.flatten(), dim=0)),
            (-0.1, 1.0),  # measured: between -0.05 and 0.03
            fine="both networks train the shared embeddings, without conflict",
            low=("the two networks pull the shared embeddings apart", "objective.tying = 'gradient-disentangled'"),
        ),
        Finding("embedding_gradient_ratio", float(others.norm() / generator.norm()), None, "unknown", cause, knob),
    ]


def diagnose_waiting(record: Mapping[str, object], peak_share: float | None = None) -> list[Finding]:
    """What a run waits for, by its last record; nothing if the record does not have it.

    Args:
        peak_share: FLOP/s of the run as a fraction of what large matrix products reach on its device; None: not measured.
    """
    findings = []
    data, host = record.get("data_share"), record.get("host_share")
    if isinstance(data, float):
        findings.append(
            finding_in_range(
                "data_share",
                data,
                (0.0, 0.05),  # a twentieth of the time is the most that faster reading could save
                fine="fraction of the time in which the run waits for data",
                high=(
                    f"{data:.0%} of the time, the run waits for data: rows are read more slowly than the device processes them",
                    "a data set on a faster disk, or fewer other programs on this machine",
                ),
            )
        )
    if isinstance(host, float):
        findings.append(
            finding_in_range(
                "host_share",
                host,
                (0.0, 0.2),
                fine="fraction of the time in which the GPU may have waited for the host to launch its work",
                high=(
                    f"in {host:.0%} of the time, the GPU had caught up with the host, which launches its work too slowly",
                    "a larger train.micro_batch_size, or train.compile = 'auto'",
                ),
            )
        )
    if peak_share is not None:
        cause = f"{peak_share:.0%} of the speed of large matrix products on this device"
        findings.append(Finding("speed_share", peak_share, None, "unknown", cause))
    return findings


# ---- when a run can be judged ----


def steps_of_run(train: TrainConfig, last: Mapping[str, Any]) -> int:
    """Number of steps of a complete run: `train.max_steps`, or those of a run that has used its `train.max_hours` before.

    Args:
        last: last record of its metrics log, if there is one.
    """
    ended = train.max_hours is not None and is_number(last.get("seconds")) and last["seconds"] >= 3600 * train.max_hours
    return int(last["step"]) if ended else train.max_steps


def diagnosable_from(warmup_steps: int, max_steps: int) -> int:
    """Step from which metrics that depend on the progress of a run can be diagnosed, counted from the start of learning."""
    # Under train.max_hours, a run may end within the steps of its warm-up, which is then shorter.
    return min(max_steps, max(warmup_steps, min(max_steps // 10, _EARLY_STEPS)))


def too_early(finding: Finding, step: int, settled: int, discriminator_from: int = 0) -> Finding:
    """The finding, without its verdict if it depends on the progress of the run and it is too early to tell.

    Args:
        settled: first step at which networks that are trained from the first step on can be diagnosed.
        discriminator_from: step at which the discriminator begins to learn.
    """
    settled += discriminator_from if finding.name.startswith("discriminator") else 0
    depends = finding.name in _OF_PROGRESS or finding.name.endswith(_OF_PROGRESS_ENDINGS)
    if step >= settled or not depends or not unusual_findings([finding]):
        return finding
    cause = f"too early to tell at step {step:,}; wait until step {settled:,}"
    return replace(finding, verdict="unknown", cause=cause, knob="")


class HealthMonitor:
    """Warns about each unusual metric during training once.

    Args:
        quiet_steps: steps after a network has begun to learn during which it is not diagnosed.
        expected: expectations of the objective.
        start_norm: `embedding_norm` of the weights that the run began with; None if unknown.
    """

    def __init__(self, quiet_steps: int, expected: Expectations, start_norm: float | None = None) -> None:
        self._quiet, self._expected, self._start_norm = quiet_steps, expected, start_norm
        self._told: set[str] = set()

    def notes(self, step: int, metrics: Mapping[str, float], norm: float | None = None) -> list[str]:
        """Return new warnings after an evaluation.

        Args:
            norm: current `embedding_norm` of the objective.
        """
        if step < self._quiet:
            return []
        if step < self._expected.discriminator_from + self._quiet:
            metrics = {name: value for name, value in metrics.items() if not name.startswith("discriminator")}
        findings = diagnose_metrics(metrics, self._expected)
        generator, discriminator = metrics.get("generator_loss"), metrics.get("discriminator_loss")
        if self._expected.weights == USUAL_WEIGHTS and generator is not None and discriminator is not None:
            share = USUAL_WEIGHTS[1] * discriminator
            findings.append(_discriminator_share(share / (USUAL_WEIGHTS[0] * generator + share)))
        if norm is not None and self._start_norm is not None:
            findings.append(diagnose_drift(norm, self._start_norm, self._expected.settings))
        new = [finding for finding in unusual_findings(findings) if finding.name not in self._told]
        self._told.update(finding.name for finding in new)
        return [warning_of(finding) for finding in new]
