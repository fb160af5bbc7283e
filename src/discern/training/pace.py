"""When a line of the journal, an evaluation or a checkpoint is due by the clock, in a run with a time budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["line", "evaluation", "checkpoint"]
KINDS: tuple[Kind, ...] = ("line", "evaluation", "checkpoint")

# Shares of the budget: enough points for a curve, whatever the budget and the machine.
_SHARES: dict[Kind, float] = {"line": 0.01, "evaluation": 0.05, "checkpoint": 0.05}
_LONGEST: dict[Kind, float] = {"checkpoint": 1800.0}  # seconds
# An evaluation or checkpoint that took a second is not repeated for 20: each costs at most a twentieth of the time.
_COST_FACTOR = 20.0


@dataclass(frozen=True)
class Due:
    """What the clock asks for after the present step."""

    line: bool = False
    evaluation: bool = False
    checkpoint: bool = False


class Pace:
    """Decides by the clock of the run, besides the intervals in steps, which stay the upper limits.

    Args:
        budget: seconds of the whole run.
        kinds: what the clock may ask for: the intervals that the user has not set.
        seconds: of the run so far, in earlier sessions.
    """

    def __init__(self, budget: float, kinds: Iterable[Kind], seconds: float = 0.0) -> None:
        self._waits = {kind: min(_SHARES[kind] * budget, _LONGEST.get(kind, budget)) for kind in kinds}
        self._last = dict.fromkeys(KINDS, seconds)

    def due(self, seconds: float) -> Due:
        """What is due `seconds` into the run."""
        return Due(**{kind: seconds - self._last[kind] >= wait for kind, wait in self._waits.items()})

    def done(self, kind: Kind, seconds: float, cost: float = 0.0) -> None:
        """Note that something was done by now, and that it took `cost` seconds."""
        # As if it had been done later: the wait is then as long as its cost demands.
        delay = max(0.0, _COST_FACTOR * cost - self._waits.get(kind, 0.0))
        self._last[kind] = seconds + delay
