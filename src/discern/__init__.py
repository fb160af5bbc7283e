"""discern: train text encoders to tell real tokens from replaced ones.

The names below are imported when they are first used: `import discern` loads no torch.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "CheckpointError": "discern.errors",
    "ConfigError": "discern.errors",
    "DataError": "discern.errors",
    "Detection": "discern.inference.detection",
    "DiscernError": "discern.errors",
    "FilledToken": "discern.inference.fill",
    "Model": "discern.inference.model",
    "NumericsError": "discern.errors",
    "Objective": "discern.objectives.base",
    "Score": "discern.inference.scoring",
    "Silent": "discern.progress",
    "TextClassifier": "discern.api.estimators",
    "TextRegressor": "discern.api.estimators",
    "TokenClassifier": "discern.api.estimators",
    "TokenData": "discern.data.dataset.shards",
    "adapt": "discern.api.verbs",
    "evaluate": "discern.api.verbs",
    "export": "discern.api.verbs",
    "finetune": "discern.api.verbs",
    "load": "discern.inference.model",
    "load_run": "discern.model_files.run",
    "predict": "discern.api.verbs",
    "prepare": "discern.api.verbs",
    "pretrain": "discern.api.verbs",
}

__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:
    from discern.api.estimators import TextClassifier as TextClassifier
    from discern.api.estimators import TextRegressor as TextRegressor
    from discern.api.estimators import TokenClassifier as TokenClassifier
    from discern.api.verbs import adapt as adapt
    from discern.api.verbs import evaluate as evaluate
    from discern.api.verbs import export as export
    from discern.api.verbs import finetune as finetune
    from discern.api.verbs import predict as predict
    from discern.api.verbs import prepare as prepare
    from discern.api.verbs import pretrain as pretrain
    from discern.data.dataset.shards import TokenData as TokenData
    from discern.errors import CheckpointError as CheckpointError
    from discern.errors import ConfigError as ConfigError
    from discern.errors import DataError as DataError
    from discern.errors import DiscernError as DiscernError
    from discern.errors import NumericsError as NumericsError
    from discern.inference.detection import Detection as Detection
    from discern.inference.fill import FilledToken as FilledToken
    from discern.inference.model import Model as Model
    from discern.inference.model import load as load
    from discern.inference.scoring import Score as Score
    from discern.model_files.run import load_run as load_run
    from discern.objectives.base import Objective as Objective
    from discern.progress import Silent as Silent


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'discern' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(__all__)


# Read by OpenMP when torch is loaded. By default, a waiting thread spins for milliseconds. If other programs need the cores as
# well, that makes the training of small networks several times slower.
if os.environ.keys().isdisjoint(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")):
    os.environ["GOMP_SPINCOUNT"] = "1000"
    if "torch" in sys.modules and sys.platform == "linux":
        logging.getLogger("discern").warning(
            "torch was imported before discern: its threads spin while they wait, which makes small networks several times "
            "slower when other programs use the cores; import discern first, or set GOMP_SPINCOUNT=1000 in the environment"
        )
