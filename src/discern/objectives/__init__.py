"""Objectives: what to corrupt and what to predict. One file and one line here for each."""

from __future__ import annotations

from typing import Any

from discern.registry import Registry

objectives: Registry[Any] = Registry("objective", "discern.objectives")
objectives.register("rtd", "discern.objectives.rtd:ReplacedTokenDetection")
objectives.register("mlm", "discern.objectives.mlm:MaskedLanguageModel")
