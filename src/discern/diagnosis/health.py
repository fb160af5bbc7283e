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
from discern.objectives.base import Objective, WordTargets
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
# AUC by guessing: 0.50; of runs whose discriminator did not begin to learn: 0.54 and 0.548; of those that did: 0.57 and more.
_LEAST_AUC = 0.55
# AUC of the smallest networks that found wrong words (docs/results, "What networks learn, on two cores"): 0.71 and 0.73.
_USEFUL_AUC = 0.7
# Adversarial training has a surrogate loss, whose value has no meaning; its gradient is the generator's.
_SURROGATE = "adversarial"
_USUAL_WEIGHTS = (1.0, 50.0)  # of the losses of generator and discriminator
# Networks that learn showed it within 1,400 steps (docs/howto/doctor.md); a run of fewer steps is diagnosed after a tenth of it.
_EARLY_STEPS = 1000
_AT_ANY_TIME = ("duplicate_fraction", "embedding_gradient_cosine", "data_share", "host_share")
"""Metrics that do not depend on the progress of a run."""

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
    texts = []
    for piece in advice:
        if isinstance(piece, str):
            texts.append(piece)
            continue
        missing = [f"{key} = {value!r}" for key, value in piece.items() if not settings or settings.get(key, value) != value]
        if missing:
            texts.append(f"for small networks {', '.join(missing)} (as preset cpu-small)")
    return "; ".join(texts)


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
        early: whether it has no verdict because it is too early to tell.
    """

    name: str
    value: float | None
    usual: tuple[float, float] | None
    verdict: Verdict
    cause: str
    knob: str = ""
    early: bool = False


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


def usefulness(auc: float) -> str:
    """What the held-out AUC of a discriminator that scores every token says about its use, and what to expect when."""
    if auc >= _USEFUL_AUC:
        return f"AUC {auc:.2f}: the discriminator tells replaced tokens from original ones; 0.5 is guessing"
    better = "better than guessing, which is 0.5, but" if auc >= _LEAST_AUC else "hardly better than guessing, which is 0.5, and"
    return (
        f"AUC {auc:.2f} is {better} not yet useful for finding wrong words. For comparison: 0.73 after the 1,644 steps of the "
        "demo in three minutes on two free cores; with preset cpu-small 0.69 after 8 million tokens and 0.76 after 45 million, "
        "an hour. Only against a strong generator, whose samples fit, is a low AUC normal"
    )


def unusual_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The findings whose values are outside their usual range."""
    return [finding for finding in findings if finding.verdict in ("low", "high")]


def warning_of(finding: Finding) -> str:
    """The warning about a finding, on one line."""
    knob = f"; try {finding.knob}" if finding.knob else ""
    return f"warning: {finding.name} {finding.value:.4f} is {finding.verdict}: {finding.cause}{knob}"


# ---- what is usual for an objective ----


@dataclass(frozen=True)
class Expectations:
    """The expected metrics of an objective.

    Attributes:
        generator_learns: whether the generator has weights; otherwise its strength is a choice.
        detects_every_token: whether the discriminator classifies every token as original or replaced. At the chosen positions
            alone, most of which were replaced, 'replaced' is the easy answer; an energy model at its best answers 'original'.
        weights: of the losses 'generator' and 'discriminator', if the loss is their sum with constant weights.
        discriminator_from: step at which the discriminator begins to learn.
        words: the words that the encoder predicts at the chosen positions; None if it predicts none, or their frequencies are
            unknown.
        local_start: whether the encoder has a local initialization.
        settings: settings of the run by dotted key, so that advice leaves out what is already set; empty if unknown.
    """

    generator_learns: bool = True
    detects_every_token: bool = True
    weights: tuple[float, float] | None = None
    discriminator_from: int = 0
    words: WordTargets | None = None
    local_start: bool = False
    settings: Settings = field(default_factory=dict)


def expectations(objective: Objective, max_steps: int, settings: Settings) -> Expectations:
    """The expectations for an objective as it is trained.

    Args:
        settings: settings of the run by dotted key.
    """
    begins, first, words = max_steps, 0, objective.word_targets()
    for phase in objective.phases(max_steps):
        if (phase.trains is None or "discriminator" in phase.trains) and "discriminator" not in phase.holds:
            begins = min(begins, first)
        first += phase.steps
    return Expectations(
        generator_learns="generator" in objective.networks(),
        detects_every_token=objective.Config.detects_every_token,
        weights=objective.loss_weights(),
        discriminator_from=begins,
        words=None if words is None or words.vocabulary.token_counts is None else words,
        local_start=isinstance(next(iter(objective.networks().values())).encoder, BertEncoder),
        settings=settings,
    )


def loss_without_context(targets: WordTargets, sampled_accuracy: float = 0.0) -> float:
    """The loss of guessing words by their frequencies and the visible word alone, in nats; an encoder has to beat it.

    Args:
        targets: how the words that the encoder predicts are chosen, with their counts.
        sampled_accuracy: fraction of the visible words that are the original, where `targets` does not tell.
    """
    special, counts = targets.vocabulary.special, torch.as_tensor(targets.vocabulary.token_counts).double().clone()
    counts[[special.pad, special.cls, special.sep, special.mask]] = 0  # never predicted
    frequencies = counts / counts.sum()
    entropy = float(torch.special.entr(frequencies).sum())
    if targets.correct is not None:
        doubt = doubt_at_shown_words(frequencies, targets.correct)
    else:  # nothing is known about how the wrong words are chosen
        shares = torch.tensor([sampled_accuracy, 1 - sampled_accuracy], dtype=torch.float64)
        doubt = (1 - sampled_accuracy) * entropy + float(torch.special.entr(shares).sum())
    return (1 - targets.shown) * entropy + targets.shown * doubt


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
                    advise(settings, _LONGER, _LOCAL_START, "a larger objective.generator_size"),
                ),
            )
        )
    recall, auc = metrics.get("discriminator_recall"), metrics.get("discriminator_auc")
    if recall is not None and expected.detects_every_token:
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
        knob = advise(settings, "another optimizer.learning_rate", _LONGER, _SMALL_NETWORK)
        told = usefulness(auc)
        finding = finding_in_range("discriminator_auc", auc, (_LEAST_AUC, 1.0), fine=told, low=(told, knob))
        # What is usual may still be of no use.
        findings.append(replace(finding, verdict="unknown") if _LEAST_AUC <= auc < _USEFUL_AUC else finding)
    generator, discriminator = metrics.get("generator_loss"), metrics.get("discriminator_loss")
    if expected.weights == _USUAL_WEIGHTS and generator is not None and discriminator is not None:
        findings.append(
            finding_in_range(
                "discriminator_loss_share",
                1 - generator / (generator + 50 * discriminator),
                (0.7, 0.9),  # at the first step 0.77, on the unigram plateau 0.74, with a good generator 0.87
                fine="as usual for the weights 1 and 50",
                low=("the generator's loss dominates: the discriminator has an easy task", "a larger objective.generator_size"),
                high=("the discriminator's loss dominates: the generator learns too little", "objective.discriminator_weight"),
            )
        )
    words = expected.words
    if words is not None and (loss := metrics.get(words.metric)) is not None:
        blind = loss_without_context(words, metrics.get("sampled_accuracy", 0.0))
        advice: list[Advice] = [_LONGER, *([_LOCAL_START] if expected.local_start else [])]
        if words.hides_all:
            advice.append("objective.mask_token_probability = 0.85, which leaves some of the chosen words visible")
        compared = f"{loss:.2f} nats; the word frequencies alone would give {blind:.2f}"
        findings.append(
            finding_in_range(
                words.metric.removesuffix("_loss") + "_gain",
                blind - loss,
                # nats; measured: -0.05 and -0.04 in runs that learned only the word frequencies, 0.22 in an mlm run that learned
                # more
                (0.1, math.inf),
                fine=f"the network uses the context: {compared}",
                low=(
                    f"the network predicts words {'hardly' if loss < blind else 'no'} better than word frequencies would: "
                    f"{compared}; this is usual early in a run; later, it means that the network is too small to start learning",
                    advise(settings, *advice),
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


def diagnose_drift(now: float, before: float, settings: Settings) -> Finding:
    """`embedding_norm` as a multiple of its value at the start."""
    return finding_in_range(
        "embedding_norm_drift",
        now / before,
        (0.0, 3.0),  # measured: 1.1 to 1.4 in runs that learn, 3.3 to 3.8 in runs that learn only the word frequencies
        fine="norm of the word embeddings, as a multiple of its value at the start",
        high=(
            "the word embeddings have grown far beyond their initial norm, as in networks that learn only word frequencies, "
            "or with too high a learning rate",
            advise(settings, "a larger model.initializer_range", _LOCAL_START, _LOWER_RATE),
        ),
    )


def diagnose_gradients(objective: Objective, output: StepOutput) -> Finding:
    """Cosine of the generator's gradient and that of the other terms at the word embeddings, if both networks train them.

    Args:
        output: of a forward pass with gradient.
    """
    table, name = _word_embeddings(objective), "embedding_gradient_cosine"
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for term_name, term in output.terms.items():
        if term.total.requires_grad:  # not for a generator without weights, or a term that is only reported
            sides[term_name in ("generator", _SURROGATE)].append(term.total * (term.weight / max(term.count, 1)))
    losses = [torch.stack(side).sum() for side in sides if side]
    gradients = [torch.autograd.grad(loss, table, retain_graph=True, materialize_grads=True)[0].flatten() for loss in losses]
    if len(gradients) < 2 or not all(gradient.any() for gradient in gradients):
        return Finding(name, None, None, "unknown", "only one network trains the word embeddings: there is no conflict")
    return finding_in_range(
        name,
        min(1.0, float(torch.cosine_similarity(gradients[0], gradients[1], dim=0))),
        (-0.1, 1.0),  # measured: between -0.05 and 0.03
        fine="both networks train the shared embeddings, without conflict",
        low=("the two networks pull the shared embeddings apart", "objective.tying = 'gradient-disentangled'"),
    )


def diagnose_waiting(record: Mapping[str, object]) -> list[Finding]:
    """What a run waits for, by its last record; nothing if the record does not have it."""
    findings = []
    for name, limit, fine, high, knob in (
        (
            "data_share",
            0.05,  # a twentieth of the time is the most that faster reading could save
            "fraction of the time in which the run waits for data",
            "the run waits for data: rows are read more slowly than the device processes them",
            "a data set on a faster disk, or fewer other programs on this machine",
        ),
        (
            "host_share",
            0.2,
            "fraction of the time in which the GPU may have waited for the host to launch its work",
            "the GPU had caught up with the host, which launches its work too slowly",
            "a larger train.micro_batch_size, or train.compile = 'auto'",
        ),
    ):
        if isinstance(share := record.get(name), float):
            findings.append(
                finding_in_range(name, share, (0.0, limit), fine=fine, high=(f"{share:.0%} of the time, {high}", knob))
            )
    return findings


# ---- when a run can be judged ----


def steps_of_run(train: TrainConfig, last: Mapping[str, Any]) -> int:
    """Number of steps of a complete run: `train.max_steps`, or those of a run that has used its `train.max_hours` before.

    Args:
        last: last record of its metrics log, if there is one.
    """
    ended = train.max_hours is not None and last.get("seconds", 0.0) >= 3600 * train.max_hours
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
    if step >= settled or finding.name in _AT_ANY_TIME or not unusual_findings([finding]):
        return finding
    cause = f"too early to tell at step {step:,}; wait until step {settled:,}"
    return replace(finding, verdict="unknown", cause=cause, knob="", early=True)


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
        findings = diagnose_metrics(metrics, self._expected)
        if norm is not None and self._start_norm is not None:
            findings.append(diagnose_drift(norm, self._start_norm, self._expected.settings))
        judged = [too_early(finding, step, self._quiet, self._expected.discriminator_from) for finding in findings]
        new = [finding for finding in unusual_findings(judged) if finding.name not in self._told]
        self._told.update(finding.name for finding in new)
        return [warning_of(finding) for finding in new]
