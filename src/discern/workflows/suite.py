"""How often the scorers of a model prefer the acceptable sentence of a minimal pair."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.artifacts.files import write_text
from discern.errors import ConfigError, DataError
from discern.progress import Progress
from discern.records import read_object
from discern.scoring.base import Scorer
from discern.scoring.minimal_pairs import MinimalPair, Preferences, blocks, read_blimp
from discern.workflows.runs import is_run
from discern.workflows.score import load_scorer

BLIMP_FILE = "blimp.json"
JUDGE_AGAIN = "remove it; `discern evaluate RUN --suite blimp --data DIR` writes it again"

_BLOCK = 512


@dataclass(frozen=True)
class SuiteRequest:
    """What to judge on which pairs.

    Attributes:
        model: a run, an export, or a Hugging Face ELECTRA.
        data: folder of BLiMP's files.
        limit: pairs of each paradigm, the first ones; None: all.
        scorers: by name; none: the one that the model itself chooses.
    """

    model: Path
    data: Path | None
    limit: int | None = None
    scorers: Sequence[str] = ()
    device: str = "auto"


def run_blimp(request: SuiteRequest, progress: Progress, warn: Callable[[str], None]) -> dict[str, Any]:
    """Accuracy overall, by phenomenon and by paradigm: of the first scorer, and under `by_scorer` of each by its name.

    Those of a run are also kept in its folder, where `discern report` finds them.

    Raises:
        ConfigError: no folder of data is given, or the model lacks what a scorer needs.
        DataError: the data or the model is missing or damaged.
        CheckpointError: the weights are missing or damaged.
    """
    if request.data is None:
        raise ConfigError(
            "BLiMP's pairs are read from a folder, and none is given", hint="add --data DIR, the folder of its .jsonl files"
        )
    pairs = read_blimp(request.data, request.limit)
    chosen = [load_scorer(request.model, name, request.device, warn=warn) for name in request.scorers or (None,)]
    found = {scorer.name: _judged(scorer, pairs, request.limit, progress) for scorer in chosen}
    if is_run(request.model):
        _keep(request.model, found, warn)
    return {**found[chosen[0].name], "by_scorer": found}


def read_kept(run: Path) -> dict[str, Any]:
    """What `run_blimp` left in a run, by scorer; nothing where there is none.

    Raises:
        DataError: it is damaged.
    """
    path = run / BLIMP_FILE
    return read_object(path, hint=JUDGE_AGAIN) if path.is_file() else {}


def _judged(scorer: Scorer, pairs: Sequence[MinimalPair], limit: int | None, progress: Progress) -> dict[str, Any]:
    preferences = Preferences()
    progress.start(f"BLiMP by '{scorer.name}'", len(pairs), "pairs")
    try:
        for block in blocks(pairs, _BLOCK):
            scores = scorer.score([text for pair in block for text in (pair.good, pair.bad)])
            for pair, good, bad in zip(block, scores[::2], scores[1::2], strict=True):
                preferences.add(pair, good.total, bad.total)
            progress.advance(len(block))
    finally:
        progress.finish()
    return {"suite": "blimp", "scorer": scorer.name, "step": scorer.step, "limit": limit, **preferences.figures()}


def _keep(run: Path, found: dict[str, Any], warn: Callable[[str], None]) -> None:
    """Leave the figures with the run, beside those of other scorers; a folder that cannot be written to is no reason to fail."""
    try:
        with suppress(DataError):  # a damaged file is replaced
            found = read_kept(run) | found
        write_text(run / BLIMP_FILE, json.dumps(found, indent=1) + "\n")
    except OSError as problem:
        warn(f"the figures are not kept for the report: {run / BLIMP_FILE}: {problem.strerror}")
