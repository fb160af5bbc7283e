"""The official metrics of the tasks, as fractions in 0-1."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scores:
    """Metrics of a set of predictions.

    Attributes:
        values: metrics by name: fractions in 0-1 (correlations in -1 to 1), apart from thresholds, and errors in the unit of
            the labels.
        degenerate: by name, why a metric is undefined on these predictions and was set to 0 ("every prediction is 1").
    """

    values: dict[str, float]
    degenerate: dict[str, str] = field(default_factory=dict)

    def undefined(self, where: str) -> list[str]:
        """Lines that say which metrics are undefined, and why, on the split `where`."""
        return [f"{name} on {where} is undefined and counts as 0: {why}" for name, why in self.degenerate.items()]
