"""The files of a task: read, checked, split and encoded before any training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from discern.data.batching.stream import derive_key, permute
from discern.errors import DataError
from discern.tasks.base import Definition, Labels, Source, Task, TaskConfig, TextEncoder
from discern.tasks.examples import Reading
from discern.tasks.supervised import Split
from discern.wording import counted

_DEBUG_EXAMPLES = 100
# Size of the selection that chooses the weights: fewer examples are too noisy, more take too long.
MIN_SELECTION, _MAX_SELECTION = 20, 1000


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
class Selection:
    """Labeled examples for the evaluations during training.

    Attributes:
        name: split that they belong to: "dev", or a part of the training file that is not trained on.
    """

    name: str
    split: Split


@dataclass(frozen=True, eq=False)
class TaskData:
    """A task with its examples and features.

    Attributes:
        dev_name: split that the headline score is computed on: "dev", "test", or "held out of train".
        evaluated: labeled splits that are scored, by name, `dev_name` first.
        unlabeled: further splits that are only predicted, by name.
        notes: messages about the files, one per line.
        source: reader of the files.
        selection: examples that select the best weights, if requested and if there are enough of them.
    """

    task: Task[Any]
    dev_name: str
    train: Split
    evaluated: dict[str, Split]
    unlabeled: dict[str, Split]
    notes: tuple[str, ...]
    files: dict[str, str]
    source: Source[Any]
    selection: Selection | None = None

    @property
    def monitored(self) -> Selection:
        """Examples that are evaluated during training: the selection, or else the split of the headline score."""
        return self.selection or Selection(self.dev_name, self.evaluated[self.dev_name])

    @cached_property
    def digests(self) -> dict[str, str]:
        """A hash of the examples of each split, by name, which shows whether a file has changed."""
        splits = {"train": self.train, **self.evaluated, **self.unlabeled}
        if self.selection is not None:
            splits["selection"] = self.selection.split
        return {name: examples_digest(split.examples) for name, split in splits.items()}


@dataclass(frozen=True)
class ReadingOptions:
    """Options for reading the files of a task.

    Attributes:
        debug: keep a hundred examples of each file.
        test: also read the test files, for a submission.
        selects: set aside examples that select the best weights: from the dev file, or else from the training file.
    """

    heldout_fraction: float
    train_rows: int | None = None
    debug: bool = False
    test: bool = False
    selects: bool = False


def find_files(definition: Definition[Any], folder: Path) -> TaskFiles:
    """Find the files of a named task in a folder.

    Raises:
        ConfigError: the folder does not exist.
        DataError: it has no training file.
    """
    found = definition.source.splits(folder)
    if "train" not in found:
        held = sorted(folder.iterdir())
        names = ", ".join(path.name for path in held[:20]) or "nothing"
        # The folders of GLUE are named like the tasks: SST-2 for sst2.
        own = next((path for path in held if path.is_dir() and path.name.replace("-", "").lower() == definition.name), None)
        hint = f"--data {own}" if own else "give the folder that has the task's files under their official names: --data FOLDER"
        raise DataError(f"{folder} has no training file of {definition.name}; it contains {names}", hint=hint)
    return TaskFiles(definition, found)


def read_task(files: TaskFiles, config: TaskConfig, text: TextEncoder, options: ReadingOptions) -> TaskData:
    """Read, check and encode the files of a task.

    Raises:
        DataError, ConfigError: a file does not fit the task; nothing has been written.
    """
    definition, paths = files.definition, files.paths
    source = definition.source.configured(config)
    train = source.read(paths["train"], "train")
    _refuse_nothing(train)
    candidates = [name for name in ("dev", "test") if name in paths and name not in files.predicted]
    found = ((name, source.read(paths[name], name)) for name in candidates)
    dev_name, dev = next(((name, reading) for name, reading in found if has_labels(reading)), ("", train))
    # Labels are taken from the whole file: a part of it may lack some of them.
    labels: Labels = definition.family.learn(train, config, definition.labels)
    notes: list[str] = []
    if not dev_name:
        train, dev = _hold_out(train, options.heldout_fraction)
        dev_name = HELD_OUT
        notes.append(f"no dev file: {len(dev.examples):,} of the training examples are held out to evaluate on")
    elif dev_name == "test":
        notes.append("no dev file: evaluating on the test file")
    task = definition.family(definition.name, config, definition.metrics, labels)
    further = {name: source.read(paths[name], name) for name in definition.report_splits if name in paths and name != dev_name}
    readings = {dev_name: dev, **{name: reading for name, reading in further.items() if has_labels(reading)}}
    if options.debug:
        train = _first(train)
        readings = {name: _first(each) for name, each in readings.items()}
    train = _some(train, options.train_rows)
    chosen = None
    if options.selects:
        train, chosen = _selection(train, dev_name, readings[dev_name], options.heldout_fraction)
        notes.append(_selection_note(dev_name, chosen))
    for reading in (train, *readings.values()):
        task.check(reading)
    unlabeled = {
        name: source.read(path, name, labeled=False)
        for name, path in paths.items()
        if name in files.predicted or (options.test and name not in readings and name != "train")
    }
    if options.debug:
        # A submission needs complete files.
        unlabeled |= {name: _first(unlabeled[name]) for name in files.predicted}

    def split(examples: Sequence[Any], *, labeled: bool) -> Split:
        return Split(tuple(examples), task.encode(examples, text, labeled=labeled))

    trained = split(task.training_examples(train.examples), labeled=True)
    evaluated = {name: split(reading.examples, labeled=True) for name, reading in readings.items()}
    selection = None
    if chosen is not None:
        name = dev_name if dev_name == "dev" else SEPARATE_PART
        if chosen is readings[dev_name]:
            selection = Selection(name, evaluated[dev_name])
        else:
            selection = Selection(name, _of_few_rows(split(chosen.examples, labeled=True), split))
    for name, reading, part in (("train", train, trained), *((name, readings[name], evaluated[name]) for name in readings)):
        notes += _notes(name, reading, part)
    return TaskData(
        task,
        dev_name,
        trained,
        evaluated,
        {name: split(reading.examples, labeled=False) for name, reading in unlabeled.items()},
        tuple(notes),
        {name: str(path) for name, path in paths.items()},
        source,
        selection,
    )


def examples_digest(examples: Sequence[Any]) -> str:
    """A hash of the examples in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(example).encode("utf-8", "replace") + b"\0")
    return digest.hexdigest()


HELD_OUT = "held out of train"
SEPARATE_PART = "a separate part of train"


def has_labels(reading: Reading[Any]) -> bool:
    """Whether the examples of a file have labels, judging by the first one.

    Raises:
        DataError: there are no examples.
    """
    _refuse_nothing(reading)
    first = reading.examples[0]
    return any(getattr(first, name, None) is not None for name in ("label", "tags", "impossible", "texts"))


def _refuse_nothing(reading: Reading[Any]) -> None:
    """Raise a DataError if a file has no examples, which the readers of registered tasks need not do."""
    if not reading.examples:
        raise DataError(f"{reading.source} has no examples", hint="check the file and its format")


def _hold_out(reading: Reading[Any], fraction: float) -> tuple[Reading[Any], Reading[Any]]:
    """Split off a fraction of the examples by a hash of their texts, so that equal texts fall on the same side."""
    kept, held = _parted(reading.examples, 0, fraction)
    if not kept or not held:
        texts = len({_fraction_of(example) for example in reading.examples})
        raise DataError(
            f"{reading.source} has {len(reading.examples):,} examples with {texts:,} different texts, too few to hold some of "
            "them out (equal texts stay together)",
            hint="give a dev file: --dev FILE",
        )
    rest = replace(reading, examples=kept, places=())
    # The notes and problems are those of the whole file.
    return rest, replace(rest, examples=held, notes=(), problems=(), source=f"held-out part of {reading.source}")


def _selection(
    train: Reading[Any], dev_name: str, dev: Reading[Any], fraction: float
) -> tuple[Reading[Any], Reading[Any] | None]:
    """Return the examples to train on, and those that select the weights (None if there are too few).

    The selection is taken from the dev file, which is meant for this purpose, or else from the training examples: a test file
    never selects weights.
    """
    if dev_name == "dev":
        chosen = _some(dev, _MAX_SELECTION)
        return train, chosen if len(chosen.examples) >= MIN_SELECTION else None
    size = len(train.examples)
    # Hashes below the fraction are held out already.
    start = fraction if dev_name == HELD_OUT else 0.0
    share = min(fraction, _MAX_SELECTION / size)
    kept, held = _parted(train.examples, start, start + share * (1 - start))
    # Equal texts fall on the same side; if there are many, all examples of a class may be among them.
    if not MIN_SELECTION <= len(held) <= 2 * share * size:
        return train, None
    rest = replace(train, examples=kept, places=())
    return rest, replace(rest, examples=held, source=f"separate part of {train.source}")


def trained_on(train: Reading[Any], task: Task[Any], dev_name: str, options: ReadingOptions, digest: str) -> Sequence[Any] | None:
    """Return the examples that an earlier run trained on; None if the training file has changed since.

    Args:
        train: the whole training file.
        dev_name: split of its headline score.
        options: options with which its files were read; `selects` is not needed.
        digest: hash of the examples that it was trained on.
    """
    if dev_name == HELD_OUT:
        train, _ = _hold_out(train, options.heldout_fraction)
    if options.debug:
        train = _first(train)
    train = _some(train, options.train_rows)
    candidates = [train]
    if dev_name != "dev":
        candidates.append(_selection(train, dev_name, train, options.heldout_fraction)[0])
    found = (task.training_examples(each.examples) for each in candidates)
    return next((examples for examples in found if examples_digest(examples) == digest), None)


def _selection_note(dev_name: str, chosen: Reading[Any] | None) -> str:
    if chosen is None:
        return "too few examples to select the best weights: the last weights are kept"
    count = len(chosen.examples)
    if dev_name == "dev":
        return (
            f"the weights are selected on the dev file ({count:,} of its examples), so the score on that file is slightly "
            "optimistic"
        )
    return f"{count:,} of the training examples are held out to select the best weights"


def _of_few_rows(split: Split, make: Callable[..., Split]) -> Split:
    """The split, reduced if its examples make many rows (windows of long contexts)."""
    rows, size = len(split.features), len(split.examples)
    if rows <= 2 * _MAX_SELECTION:
        return split
    count = max(MIN_SELECTION, size * _MAX_SELECTION // rows)
    return make(_drawn(split.examples, count), labeled=True)


def _parted(examples: Sequence[Any], start: float, stop: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The examples whose hashes are outside, and inside, a part of the range from 0 to 1."""
    inside = [start <= _fraction_of(example) < stop for example in examples]
    kept = tuple(example for example, held in zip(examples, inside, strict=True) if not held)
    return kept, tuple(example for example, held in zip(examples, inside, strict=True) if held)


def _fraction_of(example: Any) -> float:
    parts = [str(getattr(example, name, "")) for name in ("text", "pair", "words", "context")]
    digest = hashlib.blake2b("\x1f".join(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _some(reading: Reading[Any], count: int | None) -> Reading[Any]:
    if count is None or count >= len(reading.examples) or reading.indivisible:
        return reading
    return replace(reading, examples=_drawn(reading.examples, count), places=())


def _first(reading: Reading[Any]) -> Reading[Any]:
    """The first examples alone, to debug with."""
    return reading if reading.indivisible else replace(reading, examples=reading.examples[:_DEBUG_EXAMPLES])


def _drawn(examples: Sequence[Any], count: int) -> tuple[Any, ...]:
    size = len(examples)
    chosen = np.sort(permute(np.arange(count), size, derive_key("train rows", size)))
    return tuple(examples[int(row)] for row in chosen)


def _notes(name: str, reading: Reading[Any], split: Split) -> list[str]:
    rows = len(split.features)
    more = f" ({counted(rows, 'row')})" if rows != len(reading.examples) else ""
    lines = [f"{name}: {counted(len(reading.examples), 'example')}{more}, {reading.source}"]
    return [*lines, *(f"{name}: {line}" for line in (*reading.notes, *map(str, reading.problems), *split.features.notes))]
