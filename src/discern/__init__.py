"""discern: train text encoders to tell real tokens from replaced ones.

The names below are imported when they are first used: `import discern` loads no torch.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    name: module
    for module, names in {
        "discern.api.diagnose": "bench compare config_check config_diff config_presets config_schema config_show doctor evaluate "
        "report",
        "discern.api.estimators": "TextClassifier TextRegressor TokenClassifier",
        "discern.api.serving": "serve watch",
        "discern.api.train": "adapt demo finetune prepare pretrain",
        "discern.api.use": "detect embed export fill import_model predict rerank score",
        "discern.data.dataset.shards": "TokenData",
        "discern.errors": "CheckpointError ConfigError DataError DiscernError NumericsError",
        "discern.inference.detection": "Detection",
        "discern.inference.filling": "FilledToken",
        "discern.inference.model": "Model load",
        "discern.inference.scoring.scorers": "Score",
        "discern.model_files.run": "load_run",
        "discern.objectives.base": "Objective",
        "discern.progress": "Silent",
    }.items()
    for name in names.split()
}

__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:
    from discern.api.diagnose import (
        bench as bench,
        compare as compare,
        config_check as config_check,
        config_diff as config_diff,
        config_presets as config_presets,
        config_schema as config_schema,
        config_show as config_show,
        doctor as doctor,
        evaluate as evaluate,
        report as report,
    )
    from discern.api.estimators import (
        TextClassifier as TextClassifier,
        TextRegressor as TextRegressor,
        TokenClassifier as TokenClassifier,
    )
    from discern.api.serving import serve as serve, watch as watch
    from discern.api.train import adapt as adapt, demo as demo, finetune as finetune, prepare as prepare, pretrain as pretrain
    from discern.api.use import (
        detect as detect,
        embed as embed,
        export as export,
        fill as fill,
        import_model as import_model,
        predict as predict,
        rerank as rerank,
        score as score,
    )
    from discern.data.dataset.shards import TokenData as TokenData
    from discern.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DataError as DataError,
        DiscernError as DiscernError,
        NumericsError as NumericsError,
    )
    from discern.inference.detection import Detection as Detection
    from discern.inference.filling import FilledToken as FilledToken
    from discern.inference.model import Model as Model, load as load
    from discern.inference.scoring.scorers import Score as Score
    from discern.model_files.run import load_run as load_run
    from discern.objectives.base import Objective as Objective
    from discern.progress import Silent as Silent


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'discern' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


class VerbPackage(ModuleType):
    """A package with the name of a verb, which can be called like the function: `discern.report("runs/first")`."""

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.verb.__doc__

    @property
    def __signature__(self) -> Any:
        return inspect.signature(self.verb)

    @property
    def verb(self) -> Callable[..., Any]:
        name = self.__name__.rpartition(".")[2]
        function: Callable[..., Any] = getattr(import_module(_PUBLIC[name]), name)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.verb(*args, **kwargs)


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
