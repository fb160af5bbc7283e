"""Minimal pairs: two sentences that differ in whether they are grammatical, and which of them a scorer prefers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from discern.errors import DataError
from discern.parsing import json_value
from discern.tasks.readers.files import numbered_lines

_KEYS = ("sentence_good", "sentence_bad", "UID", "linguistics_term")


@dataclass(frozen=True)
class MinimalPair:
    """An acceptable sentence and an unacceptable one.

    Attributes:
        paradigm: the contrast that they are an instance of.
        phenomenon: what the paradigm belongs to.
    """

    good: str
    bad: str
    paradigm: str
    phenomenon: str


@dataclass
class _Count:
    pairs: int = 0
    right: float = 0.0

    def share(self) -> float:
        return self.right / self.pairs


class Preferences:
    """Which sentence of each pair was preferred, summed up.

    A pair is right where the acceptable sentence scores higher. Equal scores, as where a tokenizer makes the same tokens of
    both, count one half, so that one who prefers nothing is at the 0.5 of guessing.

    Differs: the paper says nothing of ties; its strict inequality would count them as wrong.
    Reference: Warstadt et al. 2020 (BLiMP), section 4: the fraction of pairs whose acceptable sentence is the likelier.
    """

    def __init__(self) -> None:
        self._all = _Count()
        self._phenomena: dict[str, _Count] = {}
        self._paradigms: dict[str, _Count] = {}
        self._ties = 0

    def add(self, pair: MinimalPair, good: float, bad: float) -> None:
        """Take in the scores of a pair."""
        counts = (
            self._all,
            self._phenomena.setdefault(pair.phenomenon, _Count()),
            self._paradigms.setdefault(pair.paradigm, _Count()),
        )
        for count in counts:
            count.pairs += 1
            count.right += 1.0 if good > bad else 0.5 if good == bad else 0.0
        self._ties += good == bad

    def figures(self) -> dict[str, Any]:
        """`accuracy` over all pairs, `by_phenomenon`, `by_paradigm`, the number of `pairs` and of `ties` among them."""
        return {
            "accuracy": self._all.share(),
            "by_phenomenon": {name: count.share() for name, count in sorted(self._phenomena.items())},
            "by_paradigm": {name: count.share() for name, count in sorted(self._paradigms.items())},
            "pairs": self._all.pairs,
            "ties": self._ties,
        }


def read_blimp(folder: Path, limit: int | None = None) -> list[MinimalPair]:
    """The pairs of BLiMP, paradigm after paradigm in the order of the file names.

    `linguistics_term` is the phenomenon: 13 values in the data, where the paper counts s-selection with argument structure.

    Args:
        folder: of one .jsonl file a paradigm, as in BLiMP's repository.
        limit: pairs to take of each file, the first ones; None: all.

    Raises:
        DataError: the folder is missing, holds no such file or no pair, or a line is none; the message names it.
    """
    paths = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    if not paths:
        state = "holds no .jsonl file" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {state}", hint="give the folder with one .jsonl file a paradigm: in BLiMP's repository, data/")
    pairs = [pair for path in paths for pair in islice(_pairs(path), limit)]
    if not pairs:
        raise DataError(f"{folder}: no pair in the {len(paths)} .jsonl files", hint=_EXPECTED)
    return pairs


def blocks(pairs: Sequence[MinimalPair], size: int) -> Iterator[Sequence[MinimalPair]]:
    """The pairs, `size` at a time."""
    return (pairs[start : start + size] for start in range(0, len(pairs), size))


def _pairs(path: Path) -> Iterator[MinimalPair]:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            values = json_value(line)
        except (ValueError, RecursionError) as problem:
            raise DataError(f"{path}:{number}: not JSON: {problem}", hint=_EXPECTED) from problem
        missing = [key for key in _KEYS if not isinstance(values, Mapping) or not isinstance(values.get(key), str)]
        if missing:
            raise DataError(f"{path}:{number}: no text under {' and '.join(missing)}", hint=_EXPECTED)
        yield MinimalPair(*(values[key] for key in _KEYS))


_EXPECTED = f"a line is a JSON object with {', '.join(_KEYS)}"
