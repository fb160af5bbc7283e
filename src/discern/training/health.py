"""Warnings about unusual metrics during training, and the step from which they can be diagnosed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from discern.training.config import TrainConfig
from discern.training.diagnosis import (
    USUAL_WEIGHTS,
    Finding,
    diagnose_drift,
    diagnose_metrics,
    discriminator_share,
    unusual_findings,
)
from discern.training.expectations import Expectations
from discern.training.metrics_log import is_number

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
