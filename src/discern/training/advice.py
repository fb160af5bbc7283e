"""Advice on an unusual figure, given the settings of the run; settings that are already on are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]
"""Of a run, by dotted key; empty: not known, and all advice is given."""


@dataclass(frozen=True)
class Advice:
    """One thing to try.

    Attributes:
        text: in words; before the settings, if there are some.
        sets: settings to make, with their values.
        after: words after the settings.
        pointless: settings with which this cannot help: a generator of full size cannot be made larger.
    """

    text: str = ""
    sets: tuple[tuple[str, object], ...] = ()
    after: str = ""
    pointless: tuple[tuple[str, object], ...] = ()

    def given(self, settings: Settings) -> str:
        """The advice without what is on already or what the objective does not have; "" where nothing is left."""
        if any(settings.get(key) == value for key, value in self.pointless):
            return ""
        missing = [(key, value) for key, value in self.sets if not settings or (key in settings and settings[key] != value)]
        if self.sets and not missing:
            return ""
        named = [f"{key} = {value!r}" for key, value in missing]
        listed = ", ".join(named[:-1]) + " and " + named[-1] if len(named) > 1 else "".join(named)
        return f"{self.text}{listed}{self.after}"


def advise(advice: Sequence[Advice], settings: Settings) -> str:
    """All advice that applies, most likely help first."""
    return "; ".join(given for each in advice if (given := each.given(settings)))


LONGER = Advice("longer training")
LOWER_RATE = Advice("a lower optimizer.learning_rate")
LARGER_GENERATOR = Advice("a larger objective.generator_size", pointless=(("objective.generator_size", 1.0),))
LOCAL_START = Advice("for small networks ", (("model.initialisation", "local"),))
SMALL_NETWORK = Advice(
    "for small networks ",
    (
        ("model.initialisation", "local"),
        ("objective.tying", "gradient-disentangled"),
        ("objective.discriminator_head", "bilinear"),
    ),
    " (as preset cpu-small)",
)
APART = Advice("", (("objective.tying", "gradient-disentangled"),))
