"""metrics.jsonl: one JSON object per line, appended during the run and consistent with the checkpoint after a resume."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from discern.errors import CheckpointError, ConfigError, DataError
from discern.parsing import is_number, json_value
from discern.storage.checksums import record_checksums, update_checksums, verify
from discern.storage.files import write_text
from discern.wording import counted

METRICS_FILE = "metrics.jsonl"
EXAMPLES_FILE = "examples.jsonl"
HELD_OUT = "heldout_"
BY_SOURCE = "heldout_by_source"
"""Key of a record, and of the metrics of an evaluation, for the held-out metrics of each source of a mixture."""
_OF_TRAINING = set(
    "step tokens seconds tokens_per_second data_share host_share device_share learning_rate grad_norm flops peak_memory_bytes "
    "generator_entropy".split()
)


class MetricsLog:
    """Writer of a run's metrics.jsonl.

    Args:
        folder: folder of the run.
        step: step from which the run continues; later records, of steps that will be repeated, are dropped.
        tensorboard: also write TensorBoard events under `folder/tensorboard`.
        tracker: name of a tracker that also receives the records.
        warn: called if the tracker fails.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        *,
        tensorboard: bool = False,
        tracker: TrackerName = "none",
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._path, self._examples = paths = folder / METRICS_FILE, folder / EXAMPLES_FILE
        records = {path: read_records(path) for path in paths if path.exists()}  # compares them with their checksums
        update_checksums(folder, {path.name: None for path in paths})  # until the log is closed
        for path, lines in records.items():
            write_text(path, "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step))
        self._stream = self._path.open("a", encoding="utf-8")
        self._trackers: list[TensorBoard | Service] = [TensorBoard(folder / "tensorboard")] if tensorboard else []
        if tracker != "none":
            self._trackers.append(Service(tracker, folder, warn))

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; values that are not finite become null.

        Raises:
            CheckpointError: the file could not be written.
        """
        clean = _finite(record)
        try:
            self._stream.write(json.dumps(clean) + "\n")
            self._stream.flush()
        except OSError as problem:
            raise CheckpointError(
                f"could not write {self._path}: {problem.strerror or problem}",
                hint="free some space and run the same command again: training continues from the last checkpoint",
            ) from problem
        numbers = {key: value for key, value in clean.items() if key != "step" and isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(record["step"], numbers)

    def write_examples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the example rows of an evaluation to examples.jsonl, if there are any. A failure to write them is ignored."""
        if rows:
            with suppress(OSError), self._examples.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": step, "rows": rows}, separators=(",", ":")) + "\n")

    def sync(self) -> None:
        """Force the written records onto the disk."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file, and record its checksum."""
        with suppress(OSError, DataError):  # an error of a full disk was reported when the record was written
            self._stream.close()
            record_checksums(self._path.parent, (path.name for path in (self._path, self._examples) if path.is_file()))
        for tracker in self._trackers:
            tracker.close()


def read_metrics(folder: Path, warn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """The records of a run, oldest first; each has a step. Damaged lines, and a last line that a kill cut short, are left out.

    Args:
        warn: called with the number of damaged lines and the first of them.

    Raises:
        DataError: the file cannot be read.
    """
    return read_records(folder / METRICS_FILE, warn)


def read_records(path: Path, warn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """The records of a file of JSON lines with a step, as `read_metrics` reads them."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror or problem}", hint="check its permissions") from problem
    verify(path, content)
    lines = content.split(b"\n")
    found = [metrics_record(line) for line in lines]
    # After the last line break there is nothing, or a line that a kill cut short.
    damaged = [number for number, (line, record) in enumerate(zip(lines[:-1], found, strict=False), 1) if line and record is None]
    if damaged and warn is not None:
        lines_out = counted(len(damaged), "damaged line")
        warn(f"{path}: left out {lines_out}, the first is line {damaged[0]}: expected a JSON object with a step")
    return [record for record in found if record is not None]


def metrics_record(line: bytes) -> dict[str, Any] | None:
    """The record on a line; None if the line is damaged."""
    try:
        found = json_value(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _finite(value: Any) -> Any:
    """A value for JSON: None in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def add_held_out(record: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the metrics of an evaluation beside those of training.

    Both have losses, so held-out losses are named `heldout_...`, whether or not this step also has training losses.
    """
    return {**record, **{f"{HELD_OUT}{key}" if _is_loss(key) or key in record else key: metrics[key] for key in metrics}}


def held_out_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of the evaluation in a record, under the names that they have there; empty without an evaluation."""
    twins = {key.removeprefix(HELD_OUT) for key in record if key.startswith(HELD_OUT)}
    if not twins:
        return {}
    return {
        key: value for key, value in record.items() if key not in _OF_TRAINING | twins and not _is_loss(key) and is_number(value)
    }


def _is_loss(key: str) -> bool:
    return not key.startswith(HELD_OUT) and (key == "loss" or key.endswith("_loss"))


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
