"""discern: train text encoders to tell real tokens from replaced ones.

The names below are imported when they are first used: `import discern` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "AdaptRequest": "discern.workflows.adapt",
    "CheckpointError": "discern.errors",
    "ConfigError": "discern.errors",
    "DataError": "discern.errors",
    "Detection": "discern.scoring.detection",
    "DiscernError": "discern.errors",
    "EvaluateRequest": "discern.workflows.evaluate",
    "FilledToken": "discern.scoring.filling",
    "FinetuneRequest": "discern.workflows.finetune",
    "Model": "discern.workflows.library",
    "NumericsError": "discern.errors",
    "Objective": "discern.objectives.base",
    "PredictRequest": "discern.workflows.predict",
    "PretrainRequest": "discern.workflows.pretrain",
    "Score": "discern.scoring.base",
    "Silent": "discern.progress",
    "TokenData": "discern.data.shards",
    "adapt": "discern.workflows.adapt",
    "evaluate": "discern.workflows.evaluate",
    "finetune": "discern.workflows.finetune",
    "load": "discern.workflows.library",
    "load_run": "discern.workflows.runs",
    "predict": "discern.workflows.predict",
    "pretrain": "discern.workflows.pretrain",
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
    from discern.workflows.adapt import AdaptRequest as AdaptRequest
    from discern.workflows.adapt import adapt as adapt
    from discern.workflows.evaluate import EvaluateRequest as EvaluateRequest
    from discern.workflows.evaluate import evaluate as evaluate
    from discern.workflows.finetune import FinetuneRequest as FinetuneRequest
    from discern.workflows.finetune import finetune as finetune
    from discern.workflows.library import Model as Model
    from discern.workflows.library import load as load
    from discern.workflows.predict import PredictRequest as PredictRequest
    from discern.workflows.predict import predict as predict
    from discern.workflows.pretrain import PretrainRequest as PretrainRequest
    from discern.workflows.pretrain import pretrain as pretrain
    from discern.workflows.runs import load_run as load_run


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'discern' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
