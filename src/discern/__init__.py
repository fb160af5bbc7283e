"""discern: train text encoders to tell real tokens from replaced ones.

The names below are imported when they are first used: `import discern` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "CheckpointError": "discern.errors",
    "ConfigError": "discern.errors",
    "DataError": "discern.errors",
    "Detection": "discern.scoring.detection",
    "DiscernError": "discern.errors",
    "FilledToken": "discern.scoring.filling",
    "Model": "discern.workflows.library",
    "NumericsError": "discern.errors",
    "Objective": "discern.objectives.base",
    "Score": "discern.scoring.base",
    "Silent": "discern.progress",
    "TextClassifier": "discern.workflows.estimator",
    "TokenData": "discern.data.shards",
    "adapt": "discern.workflows.verbs",
    "evaluate": "discern.workflows.verbs",
    "export": "discern.workflows.verbs",
    "finetune": "discern.workflows.verbs",
    "load": "discern.workflows.library",
    "load_run": "discern.workflows.runs",
    "predict": "discern.workflows.verbs",
    "prepare": "discern.workflows.verbs",
    "pretrain": "discern.workflows.verbs",
}

__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:
    from discern.data.shards import TokenData as TokenData
    from discern.errors import CheckpointError as CheckpointError
    from discern.errors import ConfigError as ConfigError
    from discern.errors import DataError as DataError
    from discern.errors import DiscernError as DiscernError
    from discern.errors import NumericsError as NumericsError
    from discern.objectives.base import Objective as Objective
    from discern.progress import Silent as Silent
    from discern.scoring.base import Score as Score
    from discern.scoring.detection import Detection as Detection
    from discern.scoring.filling import FilledToken as FilledToken
    from discern.workflows.estimator import TextClassifier as TextClassifier
    from discern.workflows.library import Model as Model
    from discern.workflows.library import load as load
    from discern.workflows.runs import load_run as load_run
    from discern.workflows.verbs import adapt as adapt
    from discern.workflows.verbs import evaluate as evaluate
    from discern.workflows.verbs import export as export
    from discern.workflows.verbs import finetune as finetune
    from discern.workflows.verbs import predict as predict
    from discern.workflows.verbs import prepare as prepare
    from discern.workflows.verbs import pretrain as pretrain


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'discern' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
