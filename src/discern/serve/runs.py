"""Runs in progress, read from their folders, without involving the process that trains.

A run may be deleted, torn or restarted while it is read. Whatever cannot be read now is left out, and read again later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from discern.data.tokenizer import TokenTexts, load_tokenizer
from discern.diagnosis.health import Expectations, steps_of_run
from discern.errors import DataError, DiscernError
from discern.model_files.run import CHECKPOINTS, CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE
from discern.model_files.run import read_record as read_run_record
from discern.parsing import is_number
from discern.report.curves import last_held_out
from discern.report.run_page import run_expectations, run_findings
from discern.serve.names import short_names
from discern.training.metrics_log import EXAMPLES_FILE, METRICS_FILE, metrics_record
from discern.training.pretrain_config import PretrainConfig, read_written_config

MAX_RUNS = 8  # lines that a chart can tell apart
_POINTS = 400  # of a curve; more cannot be told apart either
_EVALUATIONS = 60  # with examples
_READ = 1 << 24  # bytes at a time
_LONGEST_LINE = 1 << 20
_AXES = ("step", "tokens", "flops", "seconds")
_NO_CURVES = {*_AXES, "peak_memory_bytes", "data_share", "host_share", "device_share"}
_STARTED = f"{time.time_ns():x}"  # what a page knows from an earlier server, it has to ask for again
_SILENT_SECONDS = 120.0  # without a record, after which a run is no longer called training


class Tail:
    """The records of a growing file of JSON lines. It reads what was appended, and starts over if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""
        self.records: list[dict[str, Any]] = []
        self.version = 0
        self.changed_at: float | None = None

    def read(self) -> None:
        """Read what is new."""
        try:
            with self._path.open("rb") as stream:
                state = os.fstat(stream.fileno())
                identity = (state.st_dev, state.st_ino)
                if identity != self._identity or state.st_size < self._offset:
                    self._identity, self._offset, self._rest, self.records = identity, 0, b"", []
                    self.version += 1
                stream.seek(self._offset)
                new = stream.read(_READ)
        except OSError:  # gone, or not there yet
            self.changed_at = None
            return
        self.changed_at = state.st_mtime
        if not new:
            return
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        self._rest = self._rest[:_LONGEST_LINE]
        # A record of a step that was trained again replaces the earlier one.
        for record in filter(None, map(metrics_record, lines)):
            while self.records and self.records[-1]["step"] >= record["step"]:
                self.records.pop()
            self.records.append(record)
        self.version += 1


class WatchedRun:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics, self._examples = Tail(folder / METRICS_FILE), Tail(folder / EXAMPLES_FILE)
        self._config: PretrainConfig | None = None
        self._record: dict[str, Any] = {}
        self._read_from: tuple[int, ...] = ()
        self._expected: Expectations | None = None
        self._texts: TokenTexts | None = None
        self._shown: dict[int, tuple[dict[str, Any], list[list[dict[str, Any]]]]] = {}  # by step: a record, and its rows

    def read(self) -> None:
        """Read what is new in the folder."""
        self._metrics.read()
        self._examples.read()
        self._read_settings()

    @property
    def version(self) -> str:
        """Changes whenever the curves or the examples do."""
        return f"{_STARTED}.{self._metrics.version}.{self._examples.version}.{len(self._read_from)}"

    def state(self, now: float) -> dict[str, Any]:
        """Progress of the run; small, because it is sent at every refresh.

        Args:
            now: `time.time()`.
        """
        records = self._metrics.records
        last: dict[str, Any] = records[-1] if records else {}
        step, speed, seconds_between = last.get("step", 0), *self._pace()
        train = None if self._config is None else self._config.train
        steps = None if train is None or train.max_hours is not None else train.max_steps
        left = None
        whole = None if train is None else steps_of_run(train, last)
        if whole is not None and step >= whole:
            left = 0.0
        elif train is not None and train.max_hours is not None and is_number(last.get("seconds")):
            left = train.max_hours * 3600 - last["seconds"]
        elif steps is not None and speed:
            left = (steps - step) / speed
        changed = self._metrics.changed_at
        finished = left == 0 and bool(records)
        silent = None if changed is None else max(0.0, now - changed)
        if not self.folder.is_dir() or changed is None:
            condition = "gone" if records else "no records yet"
        elif finished:
            condition = "finished"
        else:
            condition = "training" if silent is not None and silent < max(_SILENT_SECONDS, 3 * seconds_between) else "silent"
        return {
            "condition": condition,
            "step": step,
            "max_steps": steps,
            "progress": self._progress(last, left),
            "seconds": _number(last, "seconds"),
            "time_used": train is not None and whole != train.max_steps,
            "seconds_left": None if condition in ("gone", "silent") else left,
            "tokens_per_second": _number(last, "tokens_per_second"),
            "silent_seconds": silent,
            "checkpoint": self._newest_checkpoint(),
            "memory_bytes": _number(last, "peak_memory_bytes"),
            "waiting": {key: last[key] for key in ("data_share", "host_share") if is_number(last.get(key))},
            "version": self.version,
        }

    def curves(self) -> dict[str, Any]:
        """The curves, the held-out metrics, the findings and the examples."""
        records = self._metrics.records
        evaluated, metrics = last_held_out(records)
        keys = {key for record in records for key, value in record.items() if key not in _NO_CURVES and is_number(value)}
        return {
            "objective": None if self._config is None else self._config.objective.name,
            "curves": {key: self._curve(key) for key in sorted(keys)},
            "held_out": [asdict(metric) for metric in metrics],
            "evaluated": evaluated,
            "findings": self._findings(),
            "examples": self._shown_examples(),
        }

    def _curve(self, key: str) -> list[list[float | None]]:
        """Points of a curve: the value, then the axes, where the record has them."""
        points = [record for record in self._metrics.records if is_number(record.get(key))]
        step = max(1, -(-len(points) // _POINTS))
        kept = [*points[:-1:step], *points[-1:]]
        return [[record[key], *(record[axis] if is_number(record.get(axis)) else None for axis in _AXES)] for record in kept]

    def _findings(self) -> list[dict[str, Any]]:
        if self._config is None or not self._metrics.records:
            return []
        try:
            if self._expected is None:
                self._expected = run_expectations(self.folder, self._config, self._record)
            found = run_findings(self._config, self._record, self._metrics.records, self._expected)
        except (DiscernError, KeyError, TypeError, ValueError):  # of another version, or damaged
            return []
        return [{name: value for name, value in asdict(each).items() if name != "usual"} for each in found]

    def _shown_examples(self) -> list[dict[str, Any]]:
        """The examples of the last evaluations, as pieces of text."""
        if self._texts is None:
            return []
        records, found = self._examples.records, []
        step = max(1, -(-len(records) // _EVALUATIONS))
        for record in [*records[:-1:step], *records[-1:]]:
            try:
                known, rows = self._shown.get(record["step"], (None, []))
                if known is not record:
                    rows = [_pieces(self._texts, **row) for row in record["rows"]]
                    self._shown[record["step"]] = record, rows
            except (KeyError, TypeError, ValueError, OverflowError):  # a damaged record
                continue
            found.append({"step": record["step"], "rows": rows})
        return found

    def _read_settings(self) -> None:
        """Read configuration, record and tokenizer, when they have changed."""
        try:
            read_from = tuple((self.folder / name).stat().st_mtime_ns for name in (CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE))
        except OSError:
            return
        if read_from == self._read_from:
            return
        try:
            config = read_written_config(self.folder / CONFIG_FILE)
            self._record = read_run_record(self.folder)
            self._texts, self._shown = TokenTexts(load_tokenizer(self.folder / TOKENIZER_FILE)), {}
        except (DiscernError, OSError):
            return
        self._config, self._read_from, self._expected = config, read_from, None

    def _pace(self) -> tuple[float, float]:
        """Steps per second over the last records, evaluations included, and seconds between two records; 0 if unknown."""
        last = [each for each in self._metrics.records[-20:] if is_number(each.get("seconds"))]
        if len(last) < 2 or last[-1]["seconds"] <= last[0]["seconds"]:
            return 0.0, 0.0
        seconds = last[-1]["seconds"] - last[0]["seconds"]
        return (last[-1]["step"] - last[0]["step"]) / seconds, seconds / (len(last) - 1)

    def _progress(self, last: dict[str, Any], left: float | None) -> float | None:
        """Fraction of the run that is done."""
        if self._config is None or not last:
            return None
        hours = self._config.train.max_hours
        of_time = 0.0 if hours is None or left is None else 1 - left / (hours * 3600)
        return min(1.0, max(of_time, float(last["step"] / self._config.train.max_steps)))

    def _newest_checkpoint(self) -> int | None:
        try:
            names = [each.name for each in os.scandir(self.folder / CHECKPOINTS)]
        except OSError:
            return None
        steps = [int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdigit()]
        return max(steps, default=None)


def _pieces(texts: TokenTexts, original: list[int], corrupted: list[int], probability: list[float]) -> list[dict[str, Any]]:
    """The tokens of a row: text, probability, whether it continues a word and, of replaced ones, what it `was`."""
    found, added = [], texts.row([int(new) for new in corrupted])
    for old, new, text, value in zip(original, corrupted, added, probability, strict=True):
        piece: dict[str, Any] = {"text": text.strip() or text, "p": float(value), "joined": not text.startswith(" ")}
        if old != new:
            piece["was"] = texts.shown(int(old))
        found.append(piece)
    return found


def _number(record: dict[str, Any], key: str) -> float | None:
    """A value of a record; None if it is missing or no finite number."""
    value: float | None = record[key] if is_number(record.get(key)) else None
    return value


class RunsWatcher:
    """The runs that were named, and those in folders that were named, in the order in which they were found.

    Args:
        paths: runs, or folders of runs.

    Raises:
        DataError: there is no such folder, or no run in it.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if not path.is_dir():
                raise DataError(f"{path} is not a folder", hint="give a run, or a folder of runs")
        self._paths = tuple(paths)
        self._runs: dict[Path, WatchedRun] = {}
        self.left_out = 0
        self.read()
        if not self._runs:
            raise DataError(
                f"there is no run in {' or '.join(map(str, paths))}: no {METRICS_FILE}",
                hint="give the folder that `discern pretrain --out RUN` writes to, once it has begun",
            )

    def read(self) -> list[WatchedRun]:
        """Read what is new in all runs. Runs that have vanished stay, with what was read of them."""
        for path in self._paths:
            for folder in _run_folders(path):
                if folder not in self._runs and len(self._runs) < MAX_RUNS:
                    self._runs[folder] = WatchedRun(folder)
        self.left_out = len({folder for path in self._paths for folder in _run_folders(path)} - self._runs.keys())
        for run in self._runs.values():
            run.read()
        return list(self._runs.values())


def _run_folders(path: Path) -> Iterator[Path]:
    """The folder, if it is a run; otherwise the runs in it."""
    if (path / METRICS_FILE).is_file() or (path / RECORD_FILE).is_file():
        yield path
        return
    try:
        inside = sorted(each for each in path.iterdir() if each.is_dir())
    except OSError:
        return
    yield from (each for each in inside if (each / METRICS_FILE).is_file())


def machine_load() -> dict[str, Any]:
    """Load of this machine: cores, the mean number of busy ones over a minute, and memory in bytes."""
    load: dict[str, Any] = {"cores": os.cpu_count() or 1, "busy": None, "memory_bytes": None, "free_bytes": None}
    if hasattr(os, "getloadavg"):
        load["busy"] = round(os.getloadavg()[0], 2)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return load
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return load | {"memory_bytes": sizes.get("MemTotal"), "free_bytes": sizes.get("MemAvailable")}


def snapshot(watcher: RunsWatcher, known: Sequence[str]) -> dict[str, Any]:
    """What the page shows; curves only of runs that have changed.

    Args:
        known: version of each run that the page has already.
    """
    now = time.time()
    found, runs = watcher.read(), []
    for number, (run, name) in enumerate(zip(found, short_names([run.folder for run in found]), strict=True)):
        state = {"name": name, **run.state(now)}
        if number >= len(known) or known[number] != state["version"]:
            state |= run.curves()
        runs.append(state)
    return {"runs": runs, "left_out": watcher.left_out, "machine": machine_load()}
