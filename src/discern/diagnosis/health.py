"""Diagnosis of a run from its metrics: the usual range of each, the likely cause of an unusual value and the setting to change.

The ranges and their origin: docs/howto/doctor.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from discern.diagnosis.expectations import (
    LARGER_GENERATOR,
    LOCAL_START,
    LONGER,
    LOWER_RATE,
    SMALL_NETWORK,
    Advice,
    Expectations,
    Settings,
    WordPrediction,
    advise,
)
from discern.objectives.base import Objective
from discern.types import StepOutput

if TYPE_CHECKING:
    from discern.training.config import TrainConfig
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from discern.parsing import is_number

Verdict = Literal["fine", "low", "high", "unknown"]

# A generator is strong if its samples equal the original this often (the authors, about their released models) ...
_STRONG_SAMPLES = 0.6
# ... With word frequencies alone, 0.006 of the samples do; 0.04 and more once a generator has begun to learn.
_WEAK_SAMPLES = 0.02
# A discriminator that answers "original" everywhere: 0.000; one that learns: 0.045 and more.
_LEAST_RECALL = 0.02
# Guessing: 0.50; runs whose discriminator did not begin to learn: 0.54 and 0.548; those that did: 0.57 and more.
_LEAST_AUC = 0.55
# Terms that train the generator: its own loss or, in adversarial training, a surrogate whose value has no meaning.
_GENERATOR_TERMS = ("generator", "adversarial")
_SURROGATES = ("adversarial",)
# Weights 1 and 50: 0.77 at the first step, 0.74 on the unigram plateau, 0.87 with a good generator.
USUAL_WEIGHTS = (1.0, 50.0)  # of generator and discriminator
_LOSS_SHARE = (0.7, 0.9)
_COSINE = (-0.1, 1.0)  # measured: between -0.05 and 0.03
_DRIFT = 3.0  # measured: 1.1 to 1.4 in runs that learn, 3.3 to 3.8 in runs that learn only the word frequencies
_LEAST_GAIN = (
    0.1  # nats; measured: -0.05 and -0.04 in runs that learned only the word frequencies, 0.22 in an mlm run that learned more
)
_DATA_SHARE = 0.05  # a twentieth of the time is the most that faster reading could save
_HOST_SHARE = 0.2
_DUPLICATES = 0.14  # the most repetitive of four common corpora


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


def diagnose_metrics(metrics: Mapping[str, float], expected: Expectations) -> list[Finding]:
    """Findings about generator and discriminator, for the held-out metrics that are given."""
    found = []
    replaced, sampled = metrics.get("replaced_fraction"), metrics.get("sampled_accuracy")
    if expected.generator_learns and replaced is not None and sampled is not None and sampled < 1:
        found.append(_replaced_fraction(replaced, replaced / (1 - sampled), expected.settings))
    recall, auc = metrics.get("discriminator_recall"), metrics.get("discriminator_auc")
    if recall is not None and not expected.detects_every_token:
        cause = "fraction of the replaced tokens that are detected; a usual range is known for objective 'rtd' only"
        found.append(Finding("discriminator_recall", recall, None, "unknown", cause))
    elif recall is not None:
        found.append(
            finding_in_range(
                "discriminator_recall",
                recall,
                (_LEAST_RECALL, 1.0),
                fine="the discriminator detects some of the replaced tokens",
                low=(
                    f"the discriminator predicts 'original' everywhere (AUC {auc or 0.0:.2f}; 0.5 "
                    "is guessing): this is usual early in a run; otherwise the learning rate is too high, or the network too "
                    "small to learn",
                    advise((LOWER_RATE, SMALL_NETWORK), expected.settings),
                ),
            )
        )
    if auc is not None and expected.detects_every_token and (recall or 0.0) >= _LEAST_RECALL:
        found.append(
            finding_in_range(
                "discriminator_auc",
                auc,
                (_LEAST_AUC, 1.0),
                fine="the discriminator tells replaced tokens from original ones better than by guessing, which is 0.5",
                low=(
                    "the discriminator has learned nothing: it marks tokens hardly better than by guessing, which is 0.5; this "
                    "is usual early in a run; otherwise the learning rate is too low or too high, or the network too small",
                    advise((Advice("another optimizer.learning_rate"), LONGER, SMALL_NETWORK), expected.settings),
                ),
            )
        )
    if expected.words is not None:
        found += _gain(metrics, expected.words, expected.settings)
    return found


def _gain(metrics: Mapping[str, float], words: WordPrediction, settings: Settings) -> list[Finding]:
    """How far the loss of predicting words is below that of guessing by word frequency."""
    targets = words.targets
    loss = metrics.get(targets.metric)
    correct = metrics.get("sampled_accuracy") if targets.correct is None else targets.correct
    if loss is None or correct is None:
        return []
    blind = words.loss_without_context(correct)
    compared = f"{loss:.2f} nats; the word frequencies alone would give {blind:.2f}"
    return [
        finding_in_range(
            targets.metric.removesuffix("_loss") + "_gain",
            blind - loss,
            (_LEAST_GAIN, float("inf")),
            fine=f"the network uses the context: {compared}",
            low=(
                f"the network predicts words {'hardly' if loss < blind else 'no'} better than word frequencies would: "
                f"{compared}; this is usual early in a run; later, it means that the network is too small to start learning",
                advise(words.advice, settings),
            ),
        )
    ]


def _replaced_fraction(replaced: float, chosen: float, settings: Settings) -> Finding:
    """Its usual range follows from the fraction of the `chosen` positions at which the sample equals the original token."""
    return finding_in_range(
        "replaced_fraction",
        replaced,
        (chosen * (1 - _STRONG_SAMPLES), chosen * (1 - _WEAK_SAMPLES)),
        fine=f"the generator's samples are neither always right nor always wrong: {1 - replaced / chosen if chosen else 0:.3f} "
        "of them equal the original token",
        low=(
            "the generator is too strong: most of its samples equal the original, so the discriminator sees few replaced tokens",
            "a smaller objective.generator_size, or a larger objective.mask_probability (the paper's large model: 0.25)",
        ),
        high=(
            "the generator is weak: hardly any sample equals the original, as it has learned little but word frequencies",
            advise((LONGER, LOCAL_START, LARGER_GENERATOR), settings),
        ),
    )


def diagnose_loss_shares(output: StepOutput, expected: Expectations) -> list[Finding]:
    """The share of each weighted term in the loss of a batch, without surrogates, whose values have no meaning."""
    parts = {
        name: term.weight * float(term.total.detach()) / max(term.count, 1)
        for name, term in output.terms.items()
        if name not in _SURROGATES
    }
    whole = sum(parts.values())
    if len(parts) < 2 or whole <= 0:
        return []
    return [
        discriminator_share(part / whole)
        if name == "discriminator" and expected.weights == USUAL_WEIGHTS
        else Finding(
            f"{name}_loss_share", part / whole, None, "unknown", "share of the weighted loss", f"objective.{name}_weight"
        )
        for name, part in parts.items()
    ]


def discriminator_share(share: float) -> Finding:
    return finding_in_range(
        "discriminator_loss_share",
        share,
        _LOSS_SHARE,
        fine="as usual for the weights 1 and 50",
        low=("the generator's loss dominates: the discriminator has an easy task", "a larger objective.generator_size"),
        high=("the discriminator's loss dominates: the generator learns too little", "objective.discriminator_weight"),
    )


def embedding_gradients(objective: Objective, output: StepOutput) -> dict[str, Tensor]:
    """The gradient of each weighted term with respect to the word embeddings, (V, E) by name; terms without one are left out.

    Args:
        output: of a forward pass with gradient.
    """
    table = _word_embeddings(objective)
    found = {}
    for name, term in output.terms.items():
        if not term.total.requires_grad:  # a generator without weights, or a term that is only reported
            continue
        loss = term.total * (term.weight / max(term.count, 1))
        (gradient,) = torch.autograd.grad(loss, [table], retain_graph=True, allow_unused=True)
        if gradient is not None and bool(gradient.any()):
            found[name] = gradient
    return found


def diagnose_gradient_cosine(gradients: Mapping[str, Tensor]) -> Finding:
    """Cosine of the generator's gradient and that of the other terms, if both train the same word embeddings."""
    name = "embedding_gradient_cosine"
    own, others = _by_network(gradients)
    if own is None or others is None:
        senders = " and ".join(gradients) or "nothing"
        return Finding(name, None, None, "unknown", f"only {senders} trains the shared word embeddings: there is no conflict")
    value = float(torch.cosine_similarity(own.flatten(), others.flatten(), dim=0))
    return finding_in_range(
        name,
        value,
        _COSINE,
        fine="both networks train the shared embeddings, without conflict",
        low=("the two networks pull the shared embeddings in opposite directions", "objective.tying = 'gradient-disentangled'"),
    )


def diagnose_gradient_ratio(gradients: Mapping[str, Tensor]) -> list[Finding]:
    """Norm of the other terms' gradient with respect to the shared word embeddings, as a multiple of the generator's."""
    own, others = _by_network(gradients)
    if own is None or others is None:
        return []
    cause = "norm of the other terms' gradient, as a multiple of the generator's: which network dominates the shared embeddings"
    return [
        Finding(
            "embedding_gradient_ratio",
            float(others.norm() / own.norm()),
            None,
            "unknown",
            cause,
            "objective.discriminator_weight, or objective.tying",
        )
    ]


def _by_network(gradients: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """The sum of the generator's gradients and that of all others; None if there are none."""
    own = [gradient for term, gradient in gradients.items() if term in _GENERATOR_TERMS]
    others = [gradient for term, gradient in gradients.items() if term not in _GENERATOR_TERMS]
    return torch.stack(own).sum(0) if own else None, torch.stack(others).sum(0) if others else None


def diagnose_duplicates(documents: int, duplicates: int) -> list[Finding]:
    """The fraction of a data set's documents that repeat another one."""
    if not documents:
        return []
    return [
        finding_in_range(
            "duplicate_fraction",
            duplicates / documents,
            (0.0, _DUPLICATES),
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
    """`embedding_norm` as a multiple of its value at the start.

    Args:
        settings: settings of the run by dotted key.
    """
    return finding_in_range(
        "embedding_norm_drift",
        now / before,
        (0.0, _DRIFT),
        fine="norm of the word embeddings, as a multiple of its value at the start",
        high=(
            "the word embeddings have grown far beyond their initial norm, as in networks that learn only word frequencies, "
            "or with too high a learning rate",
            advise((Advice("a larger model.initializer_range"), LOCAL_START, LOWER_RATE), settings or {}),
        ),
    )


def diagnose_waiting(record: Mapping[str, object], peak_share: float | None = None) -> list[Finding]:
    """What a run waits for, by its last record; nothing if the record does not have it.

    Args:
        peak_share: FLOP/s of the run as a fraction of what large matrix products reach on its device; None: not measured.
    """
    shares = {name: record.get(f"{name}_share") for name in ("data", "host")}
    found = []
    data, host = shares["data"], shares["host"]
    if isinstance(data, float):
        found.append(
            finding_in_range(
                "data_share",
                data,
                (0.0, _DATA_SHARE),
                fine="fraction of the time in which the run waits for data",
                high=(
                    f"{data:.0%} of the time, the run waits for data: rows are read more slowly than the device processes them",
                    "a data set on a faster disk, or fewer other programs on this machine",
                ),
            )
        )
    if isinstance(host, float):
        found.append(
            finding_in_range(
                "host_share",
                host,
                (0.0, _HOST_SHARE),
                fine="fraction of the time in which the GPU may have waited for the host to launch its work",
                high=(
                    f"in {host:.0%} of the time, the GPU had caught up with the host, which launches its work too slowly",
                    "a larger train.micro_batch_size, or train.compile = 'auto'",
                ),
            )
        )
    if peak_share is not None:
        held_back = max(found, key=lambda each: each.value or 0.0, default=None)
        waits = held_back is not None and held_back.verdict == "high"
        what = {"data_share": "waiting for data", "host_share": "waiting for the host"}
        cause = (
            what[held_back.name]
            if held_back is not None and waits
            else "the rest of the time goes into other work, not into waiting"
        )
        said = f"{peak_share:.0%} of the speed of large matrix products on this device: {cause}"
        found.append(Finding("speed_share", peak_share, None, "unknown", said))
    return found


def unusual_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The findings whose values are outside their usual range."""
    return [finding for finding in findings if finding.verdict in ("low", "high")]


_OF_PROGRESS = ("replaced_fraction", "discriminator_recall", "discriminator_auc", "embedding_norm_drift")
_OF_PROGRESS_ENDINGS = ("_gain", "_loss_share")
# Networks that learn showed it within 1,400 steps (docs/howto/doctor.md); a run of fewer steps is diagnosed after a tenth of it.
_EARLY_STEPS = 1000


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


def too_early(finding: Finding, step: int, settled: int) -> Finding:
    """The finding, without its verdict if it depends on the progress of the run and it is too early to tell.

    Args:
        settled: first step at which it can be diagnosed.
    """
    depends = finding.name in _OF_PROGRESS or finding.name.endswith(_OF_PROGRESS_ENDINGS)
    if step >= settled or not depends or not unusual_findings([finding]):
        return finding
    cause = f"too early to tell at step {step:,}; wait until step {settled:,}"
    return replace(finding, verdict="unknown", cause=cause, knob="")


def first_judged(finding: Finding, expected: Expectations, settled: int) -> int:
    """First step at which a finding can be diagnosed.

    Args:
        settled: the same for networks that are trained from the first step on.
    """
    return settled + (expected.discriminator_from if finding.name.startswith("discriminator") else 0)


class HealthMonitor:
    """Warns about each unusual metric during training once.

    Args:
        quiet_steps: steps after a network has begun to learn during which it is not diagnosed.
        expected: expectations of the objective.
        start_norm: `embedding_norm` of the weights that the run began with; None if unknown.
    """

    def __init__(self, quiet_steps: int, expected: Expectations, start_norm: float | None = None) -> None:
        self._quiet = quiet_steps
        self._expected = expected
        self._start_norm = start_norm
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
        found = diagnose_metrics(metrics, self._expected)
        generator, discriminator = metrics.get("generator_loss"), metrics.get("discriminator_loss")
        if self._expected.weights == USUAL_WEIGHTS and generator is not None and discriminator is not None:
            share = USUAL_WEIGHTS[1] * discriminator
            found.append(discriminator_share(share / (USUAL_WEIGHTS[0] * generator + share)))
        if norm is not None and self._start_norm is not None:
            found.append(diagnose_drift(norm, self._start_norm, self._expected.settings))
        new = [finding for finding in unusual_findings(found) if finding.name not in self._told]
        self._told.update(finding.name for finding in new)
        return [warning_of(finding) for finding in new]


def warning_of(finding: Finding) -> str:
    """The warning about a finding, on one line."""
    knob = f"; try {finding.knob}" if finding.knob else ""
    return f"warning: {finding.name} {finding.value:.4f} is {finding.verdict}: {finding.cause}{knob}"
