"""The files of a task: found, read, split and encoded before any training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from discern.errors import ConfigError, DataError, did_you_mean
from discern.tasks.base import Definition, Reading, Task, TaskConfig, TextEncoder
from discern.tasks.baselines import sample
from discern.tasks.supervised import Split
from discern.wording import counted

HELD_OUT = "held out of train"
_DEBUG_EXAMPLES = 100


@dataclass(frozen=True)
class TaskFiles:
    """A task and its files.

    Attributes:
        paths: file of each split: train, dev, test and further ones.
        predicted: splits that are only predicted: their labels are not read, and they are not evaluated.
    """

    definition: Definition[Any]
    paths: dict[str, Path]
    predicted: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TaskData:
    """A task with its examples and features.

    Attributes:
        dev_name: split that the headline score is computed on: "dev", "test", or "held out of train".
        evaluated: labeled splits that are scored, by name, `dev_name` first.
        unlabeled: further splits that are only predicted, by name.
        notes: messages about the files, one per line.
    """

    definition: Definition[Any]
    task: Task[Any]
    dev_name: str
    train: Split
    evaluated: dict[str, Split]
    unlabeled: dict[str, Split]
    notes: tuple[str, ...]
    files: dict[str, str]

    @cached_property
    def digests(self) -> dict[str, str]:
        """A hash of the examples of each split, by name, which shows whether a file has changed."""
        digests = {}
        for name, split in {"train": self.train, **self.evaluated, **self.unlabeled}.items():
            digest = hashlib.sha256()
            for example in split.examples:
                digest.update(repr(example).encode("utf-8", "replace") + b"\0")
            digests[name] = digest.hexdigest()
        return digests


def find_splits(definition: Definition[Any], folder: Path) -> dict[str, Path]:
    """The file of each split of a named task that a folder has.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        raise ConfigError(
            f"{folder} {kind}; expected a folder with {definition.files['train'][0]}", hint=did_you_mean(folder.name, siblings)
        )
    paths = {
        split: next((folder / name for name in names if (folder / name).is_file()), None)
        for split, names in definition.files.items()
    }
    return {split: path for split, path in paths.items() if path is not None}


def find_files(definition: Definition[Any], folder: Path) -> TaskFiles:
    """Find the files of a named task in a folder.

    Raises:
        ConfigError: the folder does not exist.
        DataError: it has no training file.
    """
    paths = find_splits(definition, folder)
    if "train" not in paths:
        entries = sorted(folder.iterdir())
        names = ", ".join(path.name for path in entries[:20]) or "nothing"
        # The folders of GLUE are named like the tasks: SST-2 for sst2.
        subfolder = next((path for path in entries if path.name.replace("-", "").lower() == definition.name), None)
        published = f" (published at {definition.source})" if definition.source else ""
        hint = (
            f"--data {subfolder}" if subfolder else f"give the folder of the task's files under their official names{published}"
        )
        raise DataError(f"{folder} has no training file of {definition.name}; it contains {names}", hint=hint)
    return TaskFiles(definition, paths)


def read_task(
    files: TaskFiles,
    config: TaskConfig,
    text: TextEncoder,
    heldout_fraction: float,
    train_rows: int | None = None,
    *,
    debug: bool = False,
    submits: bool = False,
) -> TaskData:
    """Read, check and encode the files of a task.

    Args:
        debug: keep a hundred examples of each file.
        submits: also read the test files, for a submission.

    Raises:
        DataError, ConfigError: a file does not fit the task; nothing has been written.
    """
    definition, paths, notes = files.definition, files.paths, []

    def read(split: str, *, labeled: bool = True) -> Reading[Any]:
        reading = definition.read(paths[split], split, config, labeled=labeled)
        if not reading.examples:  # readers of other packages need not check it
            raise DataError(f"{reading.source} has no examples", hint="check the file and its format")
        return reading

    # Read the training file, and the file to evaluate on: dev, or else test, if it has labels.
    train = read("train")
    candidates = [name for name in ("dev", "test") if name in paths and name not in files.predicted]
    readings = {name: read(name) for name in (*candidates, *definition.report_splits) if name in paths}
    if not definition.files and "dev" in readings and not has_labels(readings["dev"]):
        raise DataError(f"{readings['dev'].source} has no labels to evaluate on", hint="give a file with labels: --dev FILE")
    readings = {name: reading for name, reading in readings.items() if has_labels(reading)}
    dev_name = next((name for name in candidates if name in readings), HELD_OUT)
    # Labels are taken from the whole file: a part of it may lack some of them.
    labels = definition.family.learn(train, config, definition.labels)
    task = definition.family(definition.name, config, definition.metrics, labels)
    if dev_name == HELD_OUT:
        train, held = hold_out(train, heldout_fraction)
        readings = {HELD_OUT: held, **readings}
        notes.append(f"no dev file: {len(held.examples):,} of the training examples are held out to evaluate on")
    elif dev_name == "test":
        notes.append("no dev file: evaluating on the test file")
    readings = {name: readings[name] for name in (dev_name, *definition.report_splits) if name in readings}

    # Shorten them, and check the labels.
    if debug:
        train, readings = _first(train), {name: _first(reading) for name, reading in readings.items()}
    train = _some(train, train_rows)
    for reading in (train, *readings.values()):
        task.check(reading)
    unlabeled = {
        name: read(name, labeled=False)
        for name in paths
        if name in files.predicted or (submits and name not in readings and name != "train")
    }
    if debug:  # apart from a submission, which needs complete files
        unlabeled |= {name: _first(unlabeled[name]) for name in files.predicted}

    # Encode them.
    def encode(examples: Sequence[Any], *, labeled: bool = True) -> Split:
        return Split(tuple(examples), task.encode(examples, text, labeled=labeled))

    trained = encode(task.training_examples(train.examples))
    evaluated = {name: encode(reading.examples) for name, reading in readings.items()}
    for name, reading, split in (("train", train, trained), *((name, readings[name], evaluated[name]) for name in readings)):
        rows = len(split.features)
        more = f" ({counted(rows, 'row')})" if rows != len(reading.examples) else ""
        lines = (*reading.notes, *map(str, reading.problems), *split.features.notes)
        notes += [f"{name}: {line}" for line in (f"{counted(len(reading.examples), 'example')}{more}, {reading.source}", *lines)]
    return TaskData(
        definition,
        task,
        dev_name,
        trained,
        evaluated,
        {name: encode(reading.examples, labeled=False) for name, reading in unlabeled.items()},
        tuple(notes),
        {name: str(path) for name, path in paths.items()},
    )


def has_labels(reading: Reading[Any]) -> bool:
    """Whether the examples of a file have labels, judging by the first one."""
    return any(getattr(reading.examples[0], name, None) is not None for name in ("label", "tags", "impossible", "texts"))


def hold_out(reading: Reading[Any], fraction: float) -> tuple[Reading[Any], Reading[Any]]:
    """Split off a fraction of the examples, at least one, by a hash of their texts, so that equal texts fall on the same side."""
    hashes = [_fraction_of(example) for example in reading.examples]
    limit = max(fraction, min(hashes) + 1e-9)
    held, rest = (
        tuple(example for example, value in zip(reading.examples, hashes, strict=True) if (value < limit) is side)
        for side in (True, False)
    )
    if not rest:
        raise DataError(
            f"{reading.source} has {len(hashes):,} examples with {counted(len(set(hashes)), 'different text')}, too few to hold "
            "some of them out (equal texts stay together)",
            hint="give a dev file: --dev FILE",
        )
    # The notes and problems are those of the whole file.
    train = replace(reading, examples=rest, places=())
    return train, replace(train, examples=held, notes=(), problems=(), source=f"held-out part of {reading.source}")


def _fraction_of(example: Any) -> float:
    parts = [str(getattr(example, name, "")) for name in ("text", "pair", "words", "context")]
    digest = hashlib.blake2b("\x1f".join(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _some(reading: Reading[Any], count: int | None) -> Reading[Any]:
    """A reproducible sample of the examples, in their order."""
    if count is None or count >= len(reading.examples) or reading.indivisible:
        return reading
    return replace(reading, examples=tuple(sample(reading.examples, count, "train rows")), places=())


def _first(reading: Reading[Any]) -> Reading[Any]:
    """The first examples alone, to debug with."""
    return reading if reading.indivisible else replace(reading, examples=reading.examples[:_DEBUG_EXAMPLES])
