"""Experiment trackers that also receive the records of a run: TensorBoard's files, Weights & Biases, trackio."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from discern.errors import ConfigError

TrackerName = Literal["none", "wandb", "trackio"]
_PROJECT = "discern"


class TensorBoard:
    """TensorBoard events in a folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class Service:
    """A package with the functions `init`, `log` and `finish`, as wandb and trackio have them.

    The record is in metrics.jsonl in any case: an error of the service is reported once and does not stop the training.

    Args:
        name: name of the package.
        folder: folder of the run, whose name the run has in the tracker.
        warn: called with the first error.
    """

    def __init__(self, name: TrackerName, folder: Path, warn: Callable[[str], None]) -> None:
        self._name, self._warn, self._failed = name, warn, False
        self._package: Any = import_module(name)
        # A resumed run goes on where it was: trackio knows it by its name, wandb by an id. Other runs may be in folders of the
        # same name, such as the seeds of fine-tunings.
        path = folder.resolve()
        unique = f"{path.name}-{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
        names = {"name": path.name, "id": unique} if name == "wandb" else {"name": unique}
        self._try(lambda: self._package.init(project=_PROJECT, resume="allow", **names))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda: self._package.log(dict(values), step=step))

    def close(self) -> None:
        self._try(lambda: self._package.finish())

    def _try(self, call: Callable[[], Any]) -> None:
        if self._failed:
            return
        try:
            with redirect_stdout(sys.stderr):  # trackio greets on stdout, which belongs to --json
                call()
        except Exception as problem:  # of any kind: the service is not ours
            self._failed = True
            with suppress(Exception):
                self._warn(
                    f"train.tracker: {self._name} failed and receives no more records: {' '.join(str(problem).split())[:200]}"
                )


def check_trackers(name: TrackerName, *, tensorboard: bool) -> None:
    """Check that the packages of the trackers are installed.

    Raises:
        ConfigError: one is not.
    """
    if tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("train.tensorboard is set, but TensorBoard is not installed", hint="pip install 'discern-nlp[track]'")
    if name != "none" and find_spec(name) is None:
        raise ConfigError(f"train.tracker is {name!r}, but the package {name} is not installed", hint=f"pip install {name}")
