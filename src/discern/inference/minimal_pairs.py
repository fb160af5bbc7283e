"""Minimal pairs: how often a scorer prefers the acceptable sentence to the unacceptable one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from discern.data.tables import numbered_lines, parsed_json
from discern.errors import ConfigError, DataError
from discern.inference.scoring import TextScorer, load_scorer
from discern.model_files.run import BLIMP_FILE, is_run
from discern.progress import Progress
from discern.report.evaluation import read_blimp_results
from discern.storage.checksums import write_json

_KEYS = ("sentence_good", "sentence_bad", "UID", "linguistics_term")


@dataclass(frozen=True)
class MinimalPair:
    """An acceptable sentence and an unacceptable one.

    Attributes:
        paradigm: contrast that the pair is an instance of.
        phenomenon: linguistic phenomenon that the paradigm belongs to.
    """

    good: str
    bad: str
    paradigm: str
    phenomenon: str


class Preferences:
    """Counts of the pairs whose acceptable sentence has the higher score.

    Equal scores count one half, so that a scorer without any preference is at 0.5, as by guessing. They occur where a tokenizer
    makes the same tokens of both sentences, and, with a model that ignores context, where both have the same words in another
    order. A program that takes the first of equals, usually the acceptable sentence, would count all of these as right.

    Differs: the paper does not mention ties; its strict inequality would count them as wrong.
    Reference: Warstadt et al. 2020 (BLiMP), section 4: the fraction of pairs whose acceptable sentence is more likely.
    """

    def __init__(self) -> None:
        self._points: list[tuple[MinimalPair, float]] = []

    def add(self, pair: MinimalPair, good: float, bad: float) -> None:
        """Add the scores of a pair."""
        self._points.append((pair, 1.0 if good > bad else 0.5 if good == bad else 0.0))

    def metrics(self) -> dict[str, Any]:
        """`accuracy` over all pairs, `by_phenomenon`, `by_paradigm`; the number of `pairs`, and of `ties`, also of each group."""
        every: list[float] = []
        groups: dict[str, dict[str, list[float]]] = {"phenomenon": {}, "paradigm": {}}
        for pair, points in self._points:
            every.append(points)
            for kind, of_kind in groups.items():
                of_kind.setdefault(getattr(pair, kind), []).append(points)
        found: dict[str, Any] = {"accuracy": fmean(every), "pairs": len(every), "ties": every.count(0.5)}
        for kind, of_kind in groups.items():
            found[f"by_{kind}"] = {name: fmean(points) for name, points in sorted(of_kind.items())}
            found[f"ties_by_{kind}"] = {name: points.count(0.5) for name, points in sorted(of_kind.items())}
        return found


def read_blimp(folder: Path, limit: int | None = None) -> list[MinimalPair]:
    """The pairs of BLiMP, paradigm by paradigm, in the order of the file names.

    `linguistics_term` is the phenomenon. It has 13 values in the data; the paper counts s-selection as argument structure.

    Args:
        folder: folder with one .jsonl file per paradigm, as in BLiMP's repository.
        limit: maximum number of pairs per file, from the beginning; None: all.

    Raises:
        DataError: the folder is missing or has no such file, or a line is not a pair; the message names it.
    """
    paths = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    if not paths:
        state = "has no .jsonl files" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        raise DataError(
            f"{folder} {state}", hint="give the folder with one .jsonl file per paradigm: data/ in BLiMP's repository"
        )
    pairs = [pair for path in paths for pair in islice(_pairs(path), limit)]
    if not pairs:
        raise DataError(f"{folder}: no pairs in the {len(paths)} .jsonl files", hint=_EXPECTED)
    return pairs


def _pairs(path: Path) -> Iterator[MinimalPair]:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        values = parsed_json(line, f"{path}:{number}")
        missing = [key for key in _KEYS if not isinstance(values, Mapping) or not isinstance(values.get(key), str)]
        if missing:
            raise DataError(f"{path}:{number}: no text under {' and '.join(missing)}", hint=_EXPECTED)
        yield MinimalPair(*(values[key] for key in _KEYS))


_EXPECTED = f"expected a JSON object per line with {', '.join(_KEYS)}"


_BLOCK = 512


def run_blimp(
    model: Path,
    data: Path | None,
    progress: Progress,
    warn: Callable[[str], None],
    *,
    limit: int | None = None,
    scorers: Sequence[str] = (),
    device: str = "auto",
) -> dict[str, Any]:
    """Accuracy overall, by phenomenon and by paradigm: of the first scorer, and of every scorer by name under `by_scorer`.

    The results of a run are also stored in its folder, for `discern report`.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA.
        data: folder with the files of BLiMP.
        limit: maximum number of pairs per paradigm; None: all.
        scorers: names of scorers; empty: the default scorer of the model.

    Raises:
        ConfigError: no folder of data is given, or the model lacks a network that a scorer needs.
        DataError: the data or the model is missing or damaged.
        CheckpointError: the weights are missing or damaged.
    """
    if data is None:
        raise ConfigError("the BLiMP suite needs a folder of data", hint="add --data DIR, the folder of its .jsonl files")
    pairs = read_blimp(data, limit)
    chosen = [load_scorer(model, name, device, warn=warn) for name in scorers or (None,)]
    found = {scorer.name: _evaluated(scorer, pairs, limit, progress) for scorer in chosen}
    if is_run(model):
        _keep(model, found, warn)
    return {**found[chosen[0].name], "by_scorer": found}


def _evaluated(scorer: TextScorer, pairs: Sequence[MinimalPair], limit: int | None, progress: Progress) -> dict[str, Any]:
    preferences = Preferences()
    progress.start(f"BLiMP by '{scorer.name}'", len(pairs), "pairs")
    try:
        for first in range(0, len(pairs), _BLOCK):
            block = pairs[first : first + _BLOCK]
            scores = scorer.score([text for pair in block for text in (pair.good, pair.bad)])
            for pair, good, bad in zip(block, scores[::2], scores[1::2], strict=True):
                preferences.add(pair, good.total, bad.total)
            progress.advance(len(block))
    finally:
        progress.finish()
    return {"suite": "blimp", "scorer": scorer.name, "step": scorer.step, "limit": limit, **preferences.metrics()}


def _keep(run: Path, found: dict[str, Any], warn: Callable[[str], None]) -> None:
    """Store the results in the run's folder, beside those of other scorers; warn if this fails."""
    try:
        with suppress(DataError):  # a damaged file is replaced
            found = read_blimp_results(run) | found
        write_json(run / BLIMP_FILE, found)
    except OSError as problem:
        warn(f"the results could not be stored for the report: {run / BLIMP_FILE}: {problem.strerror}")
