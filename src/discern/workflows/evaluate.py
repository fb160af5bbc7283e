"""Held-out figures of a trained run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.data.shards import TokenData
from discern.errors import DataError
from discern.progress import Progress
from discern.training.evaluation import evaluate as held_out_figures
from discern.training.parallel import Ranks, choose_device
from discern.workflows.pretrain import heldout_stream
from discern.workflows.runs import load_run


@dataclass(frozen=True)
class EvaluateRequest:
    """What to evaluate on what.

    Attributes:
        data: data set; None: the one that the run was trained on.
        sequences: held-out rows; 0: all.
        batch_size: rows a forward pass; the figures don't depend on it.
        precision: arithmetic, 'float32' or 'bfloat16'.
    """

    run: Path
    data: Path | None = None
    sequences: int = 0
    batch_size: int = 32
    device: str = "auto"
    precision: str = "float32"


def evaluate(request: EvaluateRequest, progress: Progress, warn: Callable[[str], None]) -> dict[str, Any]:
    """The run's figures on held-out text, with the step they are of.

    Raises:
        DataError: the data set is not there, has nothing held out, or was made with another tokenizer.
        CheckpointError: the run has no sound checkpoint.
    """
    run = load_run(request.run, warn=warn)
    folder = request.data or Path(run.record["data"])
    data = TokenData.open(folder)
    if data.tokenizer_fingerprint != run.record["tokenizer_fingerprint"]:
        raise DataError(
            f"{folder} was made with another tokenizer ({data.tokenizer_fingerprint[:12]}) than {request.run} "
            f"({run.record['tokenizer_fingerprint'][:12]})",
            hint=f"prepare it again with --tokenizer {run.tokenizer_path}",
        )
    stream = heldout_stream(data, run.config)
    if stream is None:
        raise DataError(
            f"{folder} holds nothing out",
            hint="prepare it again with a larger --heldout; text that is one document needs --documents line, or more text",
        )
    ranks = Ranks(0, 1, choose_device(request.device))
    rows = min(request.sequences or stream.num_rows, stream.num_rows)
    progress.start("evaluating", rows, "rows")
    try:
        figures = held_out_figures(
            run.objective.to(ranks.device),
            stream,
            ranks,
            sequences=request.sequences,
            batch_size=request.batch_size,
            precision=request.precision,
            progress=progress,
        )
    finally:
        progress.finish()
    return {"step": run.step, "rows": rows, **figures}
