"""Replaced token detection: the objective of ELECTRA. Read `objective.py` first."""

from discern.objectives.rtd.config import RTDConfig
from discern.objectives.rtd.objective import ReplacedTokenDetection

__all__ = ["RTDConfig", "ReplacedTokenDetection"]
