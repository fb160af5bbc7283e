"""The files of a task, read, checked and turned into rows before any training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
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
# What weights are chosen by: fewer examples say nothing, more cost more time than they are worth.
LEAST_SELECTION, _MOST_SELECTION = 20, 1000


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
class Selection:
    """Labelled examples that evaluations during training go by.

    Attributes:
        name: the split that they are of: "dev", or a part of the training file that is not trained on.
    """

    name: str
    split: Split


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
        selection: what chooses the best weights, where that was asked for and there are examples enough.
    """

    task: Task[Any]
    dev_name: str
    train: Split
    judged: dict[str, Split]
    unlabelled: dict[str, Split]
    notes: tuple[str, ...]
    files: dict[str, str]
    source: Source[Any]
    selection: Selection | None = None

    @property
    def watched(self) -> Selection:
        """What is evaluated during training: the selection, or the whole split that is evaluated in the end."""
        return self.selection or Selection(self.dev_name, self.judged[self.dev_name])

    @cached_property
    def digests(self) -> dict[str, str]:
        """A hash of the examples of each split, by name: whether a file says what it said before."""
        splits = {"train": self.train, **self.judged, **self.unlabelled}
        if self.selection is not None:
            splits["selection"] = self.selection.split
        return {name: examples_digest(split.examples) for name, split in splits.items()}


@dataclass(frozen=True)
class ReadingOptions:
    """How the files of all tasks are read.

    Attributes:
        debug: keep a hundred examples of each file.
        test: read the test files too, for a submission.
        selects: take examples by which the best weights are chosen: of the dev file, or else of the training file.
    """

    heldout_fraction: float
    train_rows: int | None = None
    debug: bool = False
    test: bool = False
    selects: bool = False


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
        dev_name = HELD_OUT
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
    chosen = None
    if options.selects:
        train, chosen = _selection(train, dev_name, readings[dev_name], options.heldout_fraction)
        notes.append(_selection_note(dev_name, chosen))
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
    selection = None
    if chosen is not None:
        name = dev_name if dev_name == "dev" else SEPARATE_PART
        if chosen is readings[dev_name]:
            selection = Selection(name, judged[dev_name])
        else:
            selection = Selection(name, _of_few_rows(split(chosen.examples, labelled=True), split))
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
        selection,
    )


HELD_OUT = "held out of train"
SEPARATE_PART = "a separate part of train"


def has_labels(reading: Reading[Any]) -> bool:
    """Whether a file says what its examples are; the first tells."""
    first = reading.examples[0]
    return any(getattr(first, name, None) is not None for name in ("label", "tags", "impossible"))


def _hold_out(reading: Reading[Any], fraction: float) -> tuple[Reading[Any], Reading[Any]]:
    """A part of the examples, by what they say: equal texts fall on the same side, whatever the order of the file."""
    kept, held = _parted(reading.examples, 0, fraction)
    if not kept or not held:
        texts = len({_fraction_of(example) for example in reading.examples})
        raise DataError(
            f"{reading.source} has {len(reading.examples):,} examples with {texts:,} different texts, too few to hold some of "
            "them out (equal texts stay together)",
            hint="give a dev file: --dev FILE",
        )
    rest = replace(reading, examples=kept, places=())
    return rest, replace(rest, examples=held, source=f"held-out part of {reading.source}")


def _selection(
    train: Reading[Any], dev_name: str, dev: Reading[Any], fraction: float
) -> tuple[Reading[Any], Reading[Any] | None]:
    """What is left to train on, and what weights are chosen by: the dev file, as that is what it is for, or else a part of the
    training examples, so that the evaluated ones choose nothing. None where there are too few."""
    if dev_name == "dev":
        chosen = _some(dev, _MOST_SELECTION)
        return train, chosen if len(chosen.examples) >= LEAST_SELECTION else None
    size = len(train.examples)
    # Those below the fraction are held out already.
    start = fraction if dev_name == HELD_OUT else 0.0
    share = min(fraction, _MOST_SELECTION / size)
    kept, held = _parted(train.examples, start, start + share * (1 - start))
    # Many equal texts may all fall to one side, and with them all that there is of a class.
    if not LEAST_SELECTION <= len(held) <= 2 * share * size:
        return train, None
    rest = replace(train, examples=kept, places=())
    return rest, replace(rest, examples=held, source=f"separate part of {train.source}")


def trained_on(train: Reading[Any], task: Task[Any], dev_name: str, options: ReadingOptions, digest: str) -> Sequence[Any] | None:
    """The examples that a fine-tuning trained on, from its training file; None where the file has changed since.

    Args:
        train: the whole file.
        dev_name: what was evaluated.
        options: as the files were read then, whether or not it selected.
        digest: of the examples that it trained on.
    """
    if dev_name == HELD_OUT:
        train, _ = _hold_out(train, options.heldout_fraction)
    if options.debug:
        train = replace(train, examples=train.examples[:_DEBUG_EXAMPLES])
    train = _some(train, options.train_rows)
    candidates = [train]
    if dev_name != "dev":
        candidates.append(_selection(train, dev_name, train, options.heldout_fraction)[0])
    found = (task.training_examples(each.examples) for each in candidates)
    return next((examples for examples in found if examples_digest(examples) == digest), None)


def _selection_note(dev_name: str, chosen: Reading[Any] | None) -> str:
    if chosen is None:
        return "too few examples to choose the best weights: the last weights are kept"
    count = len(chosen.examples)
    if dev_name == "dev":
        return f"the weights are chosen on the dev file ({count:,} of its examples), so the score on it is slightly optimistic"
    return f"{count:,} of the training examples are held out to choose the best weights"


def _of_few_rows(split: Split, make: Callable[..., Split]) -> Split:
    """The same, or fewer examples of it where they make many rows (windows of long contexts)."""
    rows, size = len(split.features), len(split.examples)
    if rows <= 2 * _MOST_SELECTION:
        return split
    count = max(LEAST_SELECTION, size * _MOST_SELECTION // rows)
    return make(_drawn(split.examples, count), labelled=True)


def _parted(examples: Sequence[Any], start: float, stop: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The examples whose texts fall outside and inside a part of the range from 0 to 1."""
    inside = [start <= _fraction_of(example) < stop for example in examples]
    kept = tuple(example for example, held in zip(examples, inside, strict=True) if not held)
    return kept, tuple(example for example, held in zip(examples, inside, strict=True) if held)


def _fraction_of(example: Any) -> float:
    parts = [str(getattr(example, name, "")) for name in ("text", "pair", "words", "context")]
    digest = hashlib.blake2b("\x1f".join(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _some(reading: Reading[Any], count: int | None) -> Reading[Any]:
    if count is None or count >= len(reading.examples):
        return reading
    return replace(reading, examples=_drawn(reading.examples, count), places=())


def _drawn(examples: Sequence[Any], count: int) -> tuple[Any, ...]:
    size = len(examples)
    chosen = np.sort(permute(np.arange(count), size, derive_key("train rows", size)))
    return tuple(examples[int(row)] for row in chosen)


def _notes(name: str, reading: Reading[Any], split: Split) -> list[str]:
    rows = len(split.features)
    more = f" ({rows:,} rows)" if rows != len(reading.examples) else ""
    lines = [f"{name}: {len(reading.examples):,} examples{more}, {reading.source}"]
    return [*lines, *(f"{name}: {line}" for line in (*reading.notes, *map(str, reading.problems), *split.features.notes))]
