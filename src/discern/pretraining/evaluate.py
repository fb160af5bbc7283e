"""Evaluation of a run, or of an export with all its networks, on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from discern.data.batching.mixture import HeldoutMixture, sources_of
from discern.data.batching.stream import RowStream
from discern.data.dataset.shards import TokenData
from discern.errors import ConfigError, DataError
from discern.model_files.folder import open_model
from discern.model_files.run import EVALUATION_FILE, is_run, read_record
from discern.objectives.metrics import Breakdown
from discern.pretraining.resume import another_tokenizer
from discern.pretraining.run import heldout_stream
from discern.progress import Progress
from discern.storage.checksums import write_json
from discern.training import evaluation
from discern.training.config import PretrainConfig
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
        data: data set; None: the one that the run was trained on, or its mixture (an export does not record it).
        sequences: number of held-out rows, of each data set of a mixture; 0: all.
        batch_size: rows per forward pass; the metrics don't depend on it.
        precision: 'float32' or 'bfloat16'.

    Raises:
        ConfigError: a network of the objective is missing, or the model is an export and no data set
            is given.
        DataError: the data set is missing, has no held-out split, or was made with another tokenizer.
        CheckpointError: weights are missing or damaged.
    """
    trained = open_model(model, warn=warn)
    objective, config = trained.objective, trained.evaluation_config
    assert config is not None  # the objective was built from it

    # Open the held-out rows
    opened = trained.open_data() if data is None else TokenData.open(data)
    if opened is None:
        raise ConfigError(
            f"no data set is given, and {model} is an export, which does not record what it was trained on",
            hint=f"add --data DATA; made by: discern prepare TEXT --out DATA --tokenizer {trained.tokenizer_path} --heldout 0.5",
        )
    if opened.tokenizer_fingerprint not in trained.tokenizer_fingerprints:
        raise another_tokenizer(opened.location, opened.tokenizer_fingerprint, trained)
    stream = heldout_rows_of(opened, config)

    # Evaluate
    record = read_record(model) if is_run(model) else {"data": None}
    is_own = [source.location for source in sources_of(opened).values()] == record["data"]
    if is_own and (change := change_since(opened, model, record)) is not None:
        warn(f"{change}, and are not stored for the report")
        is_own = False
    ranks = Ranks(0, 1, choose_device(device))
    streams = stream.sources.values() if isinstance(stream, HeldoutMixture) else [stream]
    rows = sum(min(sequences or each.num_rows, each.num_rows) for each in streams)
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
            observer=breakdown.update,
        )
    finally:
        progress.finish()
    results = {"step": trained.step or 0, "rows": rows, **metrics, **breakdown.metrics()}

    # Store the metrics of the run; a folder that cannot be written is no reason to lose them
    if is_own:
        try:
            write_json(model / EVALUATION_FILE, results)
        except OSError as problem:
            warn(f"the metrics could not be stored for the report: {model / EVALUATION_FILE}: {problem.strerror}")
    return results


def heldout_rows_of(data: TokenData, config: PretrainConfig) -> RowStream:
    """The held-out rows of a data set.

    Raises:
        DataError: it has no held-out split.
    """
    stream = heldout_stream(data, config)
    if stream is None:
        raise DataError(
            f"{data.folder} has no held-out split, so nothing can be measured",
            hint="prepare it again with a larger --heldout; text that is one document needs --documents line, or more text",
        )
    return stream


def change_since(data: TokenData, run: Path, record: Mapping[str, Any]) -> str | None:
    """What to warn of if the data set of a run has been replaced since; None if it is the one that the run was trained on."""
    if record.get("data_fingerprint", "") in ("", data.fingerprint):  # a record need not have one
        return None
    return f"{data.location} has changed since {run} was trained on it: the metrics are those of its present text"
