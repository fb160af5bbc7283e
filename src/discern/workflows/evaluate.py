"""Held-out figures of a run, or of an export that holds all its networks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.artifacts.files import write_text
from discern.data.shards import TokenData
from discern.errors import ConfigError, DataError
from discern.objectives.breakdown import Breakdown
from discern.progress import Progress
from discern.training.evaluation import evaluate as held_out_figures
from discern.training.parallel import Ranks, choose_device
from discern.workflows.models import TrainedObjective, load_objective
from discern.workflows.pretrain import heldout_stream
from discern.workflows.runs import EVALUATION_FILE, is_run


@dataclass(frozen=True)
class EvaluateRequest:
    """What to evaluate on what.

    Attributes:
        model: a run, or what `discern export RUN --out DIR --all-networks` wrote.
        data: data set; None: the one that the run was trained on; an export does not know it.
        sequences: held-out rows; 0: all.
        batch_size: rows a forward pass; the figures don't depend on it.
        precision: arithmetic, 'float32' or 'bfloat16'.
    """

    model: Path
    data: Path | None = None
    sequences: int = 0
    batch_size: int = 32
    device: str = "auto"
    precision: str = "float32"


def evaluate(request: EvaluateRequest, progress: Progress, warn: Callable[[str], None]) -> dict[str, Any]:
    """The model's figures on held-out text, with the step they are of; whole, and taken apart.

    Those of a run on its own data set are also kept in its folder, where `discern report` finds them.

    Raises:
        ConfigError: the model is not all that its objective consists of, or it is an export and no data set is given.
        DataError: the data set is not there, has nothing held out, or was made with another tokenizer.
        CheckpointError: weights are missing or damaged.
    """
    model = load_objective(request.model, warn=warn)
    data = _data(request, model)
    stream = heldout_stream(data, model.config)
    if stream is None:
        raise DataError(
            f"{data.folder} has no held-out split",
            hint="prepare it again with a larger --heldout; text that is one document needs --documents line, or more text",
        )
    ranks = Ranks(0, 1, choose_device(request.device))
    rows = min(request.sequences or stream.num_rows, stream.num_rows)
    breakdown = Breakdown(data.token_counts())
    progress.start("evaluating", rows, "rows")
    try:
        figures = held_out_figures(
            model.objective.to(ranks.device),
            stream,
            ranks,
            sequences=request.sequences,
            batch_size=request.batch_size,
            precision=request.precision,
            progress=progress,
            observer=breakdown,
        )
    finally:
        progress.finish()
    found = {"step": model.step, "rows": rows, **figures, **breakdown.figures()}
    if is_run(request.model) and model.data is not None and data.folder.resolve() == model.data.resolve():
        _keep(request.model, found, warn)
    return found


def _keep(run: Path, found: dict[str, Any], warn: Callable[[str], None]) -> None:
    """Leave the figures with the run; a folder that cannot be written to is no reason to fail."""
    try:
        write_text(run / EVALUATION_FILE, json.dumps(found, indent=1) + "\n")
    except OSError as problem:
        warn(f"the figures are not kept for the report: {run / EVALUATION_FILE}: {problem.strerror}")


def _data(request: EvaluateRequest, model: TrainedObjective) -> TokenData:
    """The data set to measure on, made with the model's tokenizer."""
    folder = request.data or model.data
    prepare = f"discern prepare TEXT --out DATA --tokenizer {model.tokenizer_path} --heldout 0.5"
    if folder is None:
        raise ConfigError(
            f"no data set is given, and {request.model} is an export, which does not know the one it was trained on",
            hint=f"add --data DATA; made by: {prepare}",
        )
    data = TokenData.open(folder)
    if data.tokenizer_fingerprint not in model.tokenizer_fingerprints:
        raise DataError(
            f"{folder} was made with another tokenizer ({data.tokenizer_fingerprint[:12]}) than {request.model} "
            f"({model.tokenizer_fingerprints[0][:12]})",
            hint=f"prepare it again: {prepare}",
        )
    return data
