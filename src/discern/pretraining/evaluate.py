"""Evaluation of a run, or of an export with all its networks, on held-out text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from discern.artifacts.model_folder import ModelFolder
from discern.artifacts.opening import open_model
from discern.artifacts.run import EVALUATION_FILE, is_run, read_record
from discern.data.dataset.shards import TokenData, located
from discern.errors import ConfigError, DataError
from discern.objectives.breakdown import Breakdown
from discern.pretraining.rows import heldout_stream
from discern.progress import Progress
from discern.storage.checksums import write_recorded
from discern.training import evaluation
from discern.training.distributed import Ranks, choose_device


def evaluate(
    model: Path,
    *,
    data: Path | None = None,
    sequences: int = 0,
    batch_size: int = 32,
    device: str = "auto",
    precision: str = "float32",
    progress: Progress,
    warn: Callable[[str], None],
) -> dict[str, Any]:
    """Evaluate a model on held-out text. Return its step and its metrics, overall and by groups of tokens.

    The metrics of a run on its own data set are also stored in its folder, for `discern report`; not if it has changed since.

    Args:
        model: a run, or the folder that `discern export RUN --out DIR --all-networks` wrote.
        data: data set; None: the one that the run was trained on (an export does not record it).
        sequences: number of held-out rows; 0: all.
        batch_size: rows per forward pass; the metrics don't depend on it.
        precision: 'float32' or 'bfloat16'.

    Raises:
        ConfigError: a number is out of range, a network of the objective is missing, or the model is an export and no data set
            is given.
        DataError: the data set is missing, has no held-out split, or was made with another tokenizer.
        CheckpointError: weights are missing or damaged.
    """
    check_sequences(sequences)
    if batch_size < 1:
        raise ConfigError(f"--batch-size is {batch_size}, expected at least 1", hint="omit it for 32 rows at a time")
    trained = open_model(model, warn=warn)
    objective, config = trained.objective, trained.evaluation_config
    assert config is not None  # the objective was built from it
    opened = open_data(model, trained, data)
    stream = heldout_stream(opened, config)
    if stream is None:
        raise DataError(
            f"{opened.folder} has no held-out split",
            hint="prepare it again with a larger --heldout; text that is one document needs --documents line, or more text",
        )
    is_own = is_run(model) and trained.data is not None and opened.location == located(trained.data)
    if is_own and (change := change_since(opened, model, read_record(model))) is not None:
        warn(f"{change}, and are not stored for the report")
        is_own = False
    ranks = Ranks(0, 1, choose_device(device))
    rows = min(sequences or stream.num_rows, stream.num_rows)
    breakdown = Breakdown(opened.token_counts())
    progress.start("evaluating", rows, "rows")
    try:
        metrics = evaluation.evaluate(
            objective.to(ranks.device),
            stream,
            ranks,
            sequences=sequences,
            batch_size=batch_size,
            precision=precision,
            progress=progress,
            observer=breakdown,
        )
    finally:
        progress.finish()
    found = {"step": trained.step or 0, "rows": rows, **metrics, **breakdown.metrics()}
    if is_own:
        _keep(model, found, warn)
    return found


def change_since(data: TokenData, run: Path, record: Mapping[str, Any]) -> str | None:
    """What to warn of if the data set of a run has been replaced since; None if it is the one that the run was trained on."""
    if record.get("data_fingerprint", "") in ("", data.fingerprint):  # a record need not have one
        return None
    return f"{data.location} has changed since {run} was trained on it: the metrics are those of its present text"


def check_sequences(sequences: int) -> None:
    """Check the number of held-out rows to evaluate on.

    Raises:
        ConfigError: it is negative.
    """
    if sequences < 0:
        raise ConfigError(f"--sequences is {sequences}, expected a number of rows", hint="0 evaluates on all of them")


def _keep(run: Path, found: dict[str, Any], warn: Callable[[str], None]) -> None:
    """Store the metrics in the folder of the run. If the folder cannot be written, warn instead of failing."""
    try:
        write_recorded(run, {EVALUATION_FILE: json.dumps(found, indent=1) + "\n"})
    except OSError as problem:
        warn(f"the metrics could not be stored for the report: {run / EVALUATION_FILE}: {problem.strerror}")


def open_data(model: Path, trained: ModelFolder, data: Path | None) -> TokenData:
    """The data set to evaluate on, after checking that it was made with the model's tokenizer."""
    folder = data or trained.data
    prepare = f"discern prepare TEXT --out DATA --tokenizer {trained.tokenizer_path} --heldout 0.5"
    if folder is None:
        raise ConfigError(
            f"no data set is given, and {model} is an export, which does not record what it was trained on",
            hint=f"add --data DATA; made by: {prepare}",
        )
    opened = TokenData.open(folder)
    if opened.tokenizer_fingerprint not in trained.tokenizer_fingerprints:
        raise DataError(
            f"{folder} was made with a different tokenizer ({opened.tokenizer_fingerprint[:12]}) from that of {model} "
            f"({trained.tokenizer_fingerprints[0][:12]})",
            hint=f"prepare it again: {prepare}",
        )
    return opened
