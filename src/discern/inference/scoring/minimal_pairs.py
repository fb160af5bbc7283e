"""Minimal pairs: how often a scorer prefers the acceptable sentence to the unacceptable one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from discern.data.tables import open_table
from discern.errors import ConfigError, DataError
from discern.inference.scoring.scorers import load_scorer
from discern.inference.texts import numbered
from discern.model_files.run import BLIMP_FILE, is_run
from discern.progress import Progress
from discern.report.metrics import read_blimp_results
from discern.storage.checksums import Record, understood, write_json

_EXPECTED = "expected a JSON object per line with sentence_good, sentence_bad, UID, linguistics_term"


class MinimalPair(Record):
    """An acceptable sentence and an unacceptable one, under the keys of BLiMP.

    Attributes:
        UID: paradigm, the contrast that the pair is an instance of.
        linguistics_term: linguistic phenomenon that the paradigm belongs to.
    """

    sentence_good: str
    sentence_bad: str
    UID: str
    linguistics_term: str


def preferences(scored: Iterable[tuple[MinimalPair, float, float]]) -> dict[str, Any]:
    """The fraction of the pairs whose acceptable sentence has the higher score: `accuracy` over all pairs, `by_phenomenon`,
    `by_paradigm`; the number of `pairs`, and of `ties`, also of each group.

    Equal scores count one half, so that a scorer without any preference is at 0.5, as by guessing. They occur where a tokenizer
    makes the same tokens of both sentences, and, with a model that ignores context, where both have the same words in another
    order. A program that takes the first of equals, usually the acceptable sentence, would count all of these as right.

    Args:
        scored: pairs with the scores of the acceptable and of the other sentence.

    Differs: the paper does not mention ties; its strict inequality would count them as wrong.
    Reference: Warstadt et al. 2020 (BLiMP), section 4: the fraction of pairs whose acceptable sentence is more likely.
    """
    points: dict[tuple[str, str], list[float]] = {}
    for pair, good, bad in scored:
        for group in (("", ""), ("phenomenon", pair.linguistics_term), ("paradigm", pair.UID)):
            points.setdefault(group, []).append(1.0 if good > bad else 0.5 if good == bad else 0.0)
    every = points.pop(("", ""))
    found: dict[str, Any] = {"accuracy": fmean(every), "pairs": len(every), "ties": every.count(0.5)}
    for (kind, name), some in sorted(points.items()):
        found.setdefault(f"by_{kind}", {})[name] = fmean(some)
        found.setdefault(f"ties_by_{kind}", {})[name] = some.count(0.5)
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
    pairs = []
    for path in sorted(folder.glob("*.jsonl")):
        for row in islice(open_table(path).rows, limit):
            with understood(row.where, hint=_EXPECTED):
                pairs.append(MinimalPair.model_validate(row.values))
    if not pairs:
        hint = f"give data/ of BLiMP's repository, with one file per paradigm; {_EXPECTED}"
        raise DataError(f"{folder} has no .jsonl files with pairs", hint=hint)
    return pairs


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
    found: dict[str, dict[str, Any]] = {}
    for scorer in [load_scorer(model, name, device, warn=warn) for name in scorers or (None,)]:
        texts = numbered(text for pair in pairs for text in (pair.sentence_good, pair.sentence_bad))
        scores = [score.total for block in scorer.score_blocks(texts, progress, warn) for _, score in block]
        metrics = preferences(zip(pairs, scores[::2], scores[1::2], strict=True))
        found[scorer.name] = {"suite": "blimp", "scorer": scorer.name, "step": scorer.step, "limit": limit, **metrics}
    if is_run(model):
        earlier: dict[str, Any] = {}
        with suppress(DataError):  # a damaged file is replaced
            earlier = read_blimp_results(model)
        try:
            write_json(model / BLIMP_FILE, earlier | found)
        except OSError as problem:
            warn(f"the results could not be stored for the report: {model / BLIMP_FILE}: {problem.strerror}")
    return {**next(iter(found.values())), "by_scorer": found}
