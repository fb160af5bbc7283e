"""The files of a task, read, checked and turned into rows before any training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from discern.data.ordering import derive_key, permute
from discern.errors import DataError
from discern.tasks.base import Definition, Labels, Source, Task, TaskConfig, TextEncoder
from discern.tasks.examples import Reading
from discern.tasks.supervised import Split
from discern.workflows.features_cache import cached_features, examples_digest

_DEBUG_EXAMPLES = 100


@dataclass(frozen=True)
class TaskFiles:
    """What a task is read from.

    Attributes:
        paths: by split: train, dev, test and further ones.
        predicted: splits that are predicted, and neither read for labels nor evaluated.
    """

    definition: Definition[Any]
    paths: dict[str, Path]
    predicted: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TaskData:
    """A task with its rows.

    Attributes:
        dev_name: what the evaluated split is: "dev", "test", or "held out of train".
        train: None where the task is only judged.
        judged: labelled splits that scores are computed on, the evaluated one first, by name.
        unlabelled: further splits to predict, by name.
        notes: what was found and decided, a line each.
        source: how the files are read.
    """

    task: Task[Any]
    dev_name: str
    train: Split
    judged: dict[str, Split]
    unlabelled: dict[str, Split]
    notes: tuple[str, ...]
    files: dict[str, str]
    source: Source[Any]

    @cached_property
    def digests(self) -> dict[str, str]:
        """A hash of the examples of each split, by name: whether a file says what it said before."""
        splits = {"train": self.train, **self.judged, **self.unlabelled}
        return {name: examples_digest(split.examples) for name, split in splits.items()}


@dataclass(frozen=True)
class ReadingOptions:
    """How the files of all tasks are read.

    Attributes:
        debug: keep a hundred examples of each file.
        test: read the test files too, for a submission.
    """

    heldout_fraction: float
    train_rows: int | None = None
    debug: bool = False
    test: bool = False


def find_files(definition: Definition[Any], folder: Path) -> TaskFiles:
    """The files of a named task in a folder.

    Raises:
        ConfigError: there is no such folder.
        DataError: it holds no training file.
    """
    found = definition.source.splits(folder)
    if "train" not in found:
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
        raise DataError(f"{folder} holds no training file of {definition.name}; it holds {held}", hint="check --data")
    return TaskFiles(definition, found)


def read_task(files: TaskFiles, config: TaskConfig, text: TextEncoder, options: ReadingOptions) -> TaskData:
    """Read, check and encode the files of a task.

    Raises:
        DataError, ConfigError: a file that does not fit; nothing has been written.
    """
    definition, paths = files.definition, files.paths
    source = definition.source.configured(config)
    train = source.read(paths["train"], "train")
    candidates = [name for name in ("dev", "test") if name in paths and name not in files.predicted]
    found = ((name, source.read(paths[name], name)) for name in candidates)
    dev_name, dev = next(((name, reading) for name, reading in found if has_labels(reading)), ("", train))
    # From the whole file: a part of it may lack a label that another part has.
    labels: Labels = definition.family.learn(train, config, definition.labels)
    notes: list[str] = []
    if not dev_name:
        train, dev = _hold_out(train, options.heldout_fraction)
        dev_name = "held out of train"
        notes.append(f"no dev file: {len(dev.examples):,} of the training examples are held out to evaluate on")
    elif dev_name == "test":
        notes.append("no dev file: the test file is evaluated")
    task = definition.family(definition.name, config, definition.metrics, labels)
    further = {name: source.read(paths[name], name) for name in definition.report_splits if name in paths and name != dev_name}
    readings = {dev_name: dev, **{name: reading for name, reading in further.items() if has_labels(reading)}}
    if options.debug:
        train = replace(train, examples=train.examples[:_DEBUG_EXAMPLES])
        readings = {name: replace(each, examples=each.examples[:_DEBUG_EXAMPLES]) for name, each in readings.items()}
    train = _some(train, options.train_rows)
    for reading in (train, *readings.values()):
        task.check(reading)
    unlabelled = {
        name: source.read(path, name, labelled=False)
        for name, path in paths.items()
        if name in files.predicted or (options.test and name not in readings and name != "train")
    }
    if options.debug:
        # A submission needs the whole of its files.
        unlabelled |= {
            name: replace(unlabelled[name], examples=unlabelled[name].examples[:_DEBUG_EXAMPLES]) for name in files.predicted
        }

    def split(examples: Sequence[Any], *, labelled: bool) -> Split:
        return Split(tuple(examples), cached_features(task, examples, text, labelled=labelled))

    trained = split(task.training_examples(train.examples), labelled=True)
    judged = {name: split(reading.examples, labelled=True) for name, reading in readings.items()}
    for name, reading, part in (("train", train, trained), *((name, readings[name], judged[name]) for name in readings)):
        notes += _notes(name, reading, part)
    return TaskData(
        task,
        dev_name,
        trained,
        judged,
        {name: split(reading.examples, labelled=False) for name, reading in unlabelled.items()},
        tuple(notes),
        {name: str(path) for name, path in paths.items()},
        source,
    )


def has_labels(reading: Reading[Any]) -> bool:
    """Whether a file says what its examples are; the first tells."""
    first = reading.examples[0]
    return any(getattr(first, name, None) is not None for name in ("label", "tags", "impossible"))


def _hold_out(reading: Reading[Any], fraction: float) -> tuple[Reading[Any], Reading[Any]]:
    """A part of the examples, by what they say: equal texts fall on the same side, whatever the order of the file."""
    keyed = [(_fraction_of(example), example) for example in reading.examples]
    kept = tuple(example for place, example in keyed if place >= fraction)
    held = tuple(example for place, example in keyed if place < fraction)
    if not kept or not held:
        texts = len({place for place, _ in keyed})
        raise DataError(
            f"{reading.source} has {len(reading.examples):,} examples with {texts:,} different texts, too few to hold some of "
            "them out (equal texts stay together)",
            hint="give a dev file: --dev FILE",
        )
    rest = replace(reading, examples=kept, places=())
    return rest, replace(rest, examples=held, source=f"held-out part of {reading.source}")


def _fraction_of(example: Any) -> float:
    parts = [str(getattr(example, name, "")) for name in ("text", "pair", "words", "context")]
    digest = hashlib.blake2b("\x1f".join(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _some(reading: Reading[Any], count: int | None) -> Reading[Any]:
    if count is None or count >= len(reading.examples):
        return reading
    size = len(reading.examples)
    chosen = np.sort(permute(np.arange(count), size, derive_key("train rows", size)))
    return replace(reading, examples=tuple(reading.examples[int(row)] for row in chosen), places=())


def _notes(name: str, reading: Reading[Any], split: Split) -> list[str]:
    rows = len(split.features)
    more = f" ({rows:,} rows)" if rows != len(reading.examples) else ""
    lines = [f"{name}: {len(reading.examples):,} examples{more}, {reading.source}"]
    return [*lines, *(f"{name}: {line}" for line in (*reading.notes, *map(str, reading.problems), *split.features.notes))]
