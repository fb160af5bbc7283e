"""metrics.jsonl: one JSON object a line, appended as the run goes, consistent with the checkpoint after a resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from discern.artifacts.files import write_text
from discern.errors import CheckpointError
from discern.parsing import json_value

METRICS_FILE = "metrics.jsonl"
HELD_OUT = "heldout_"
_OF_TRAINING = {
    "step",
    "tokens",
    "seconds",
    "tokens_per_second",
    "learning_rate",
    "grad_norm",
    "flops",
    "peak_memory_bytes",
    "generator_entropy",  # of adversarial training
}


class Journal:
    """Writes the figures of a run.

    Args:
        folder: of the run.
        step: the step that the run continues from; lines beyond it, of steps that will be done again, are dropped.
        tensorboard: also write TensorBoard events under `folder/tensorboard`.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool = False) -> None:
        self._path = folder / METRICS_FILE
        _truncate(self._path, step)
        self._stream = self._path.open("a", encoding="utf-8")
        self._events = _event_writer(folder / "tensorboard") if tensorboard else None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; a value that is not finite becomes null."""
        clean = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
        try:
            self._stream.write(json.dumps(clean) + "\n")
            self._stream.flush()
        except OSError as problem:
            raise CheckpointError(
                f"could not write {self._path}: {problem}",
                hint="free some space and run the same command again: it goes on from the last checkpoint",
            ) from problem
        if self._events is not None:
            for key, value in clean.items():
                if key != "step" and isinstance(value, int | float):
                    self._events.add_scalar(key, value, record["step"])

    def rewind(self, step: int) -> None:
        """Drop the lines beyond a step."""
        self._stream.close()
        _truncate(self._path, step)
        self._stream = self._path.open("a", encoding="utf-8")

    def sync(self) -> None:
        """Force what was written onto the disk."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file; a line that a full disk refuses has been complained of already."""
        with suppress(OSError):
            self._stream.close()
        if self._events is not None:
            self._events.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, oldest first; a line cut short by a kill is left out."""
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json_value(line))
        except json.JSONDecodeError:
            continue
    return records


def lines_of(folder: Path, step: int) -> list[dict[str, Any]]:
    """The records of one step of a run."""
    return [record for record in read_metrics(folder) if record.get("step") == step]


def add_held_out(record: Mapping[str, Any], figures: Mapping[str, float]) -> dict[str, Any]:
    """A line of the journal with the figures of an evaluation beside those of training.

    Losses are of both kinds, so those held out are named `heldout_...`, whether or not this step has trained on them.
    """
    return {**record, **{f"{HELD_OUT}{key}" if _is_loss(key) or key in record else key: figures[key] for key in figures}}


def held_out_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of an evaluation in a line of the journal, by the names that they have there; none where there was none."""
    twins = {key.removeprefix(HELD_OUT) for key in record if key.startswith(HELD_OUT)}
    if not twins:
        return {}
    return {
        key: value for key, value in record.items() if key not in _OF_TRAINING | twins and not _is_loss(key) and is_number(value)
    }


def is_number(value: object) -> bool:
    """Whether a value of the journal is a number, and finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_loss(key: str) -> bool:
    return not key.startswith(HELD_OUT) and (key == "loss" or key.endswith("_loss"))


def _truncate(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [record for record in read_metrics(path.parent) if record.get("step", 0) <= step]
    write_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def _event_writer(folder: Path) -> Any:
    from discern.errors import ConfigError

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as problem:
        raise ConfigError(
            "train.tensorboard is set, but TensorBoard is not installed", hint="pip install 'discern-nlp[track]'"
        ) from problem
    return SummaryWriter(str(folder))
