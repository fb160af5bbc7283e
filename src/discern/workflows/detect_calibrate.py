"""The threshold of a detector: found on a data set's held-out text, kept beside the model, and looked up there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from discern.artifacts.files import write_text
from discern.checksums import CHECKSUMS_NAME, write_recorded
from discern.data.packed import PackedRows
from discern.data.shards import TokenData
from discern.data.stream import ExampleStream
from discern.errors import ConfigError, DataError
from discern.interop.names import CALIBRATION_NAME
from discern.objectives.metrics import area_under_curve
from discern.progress import Progress
from discern.records import Record, read_record
from discern.scoring.calibration import FEWEST_MARKED, Judged, find_threshold, head_fingerprint, judge_corrupted
from discern.scoring.detection import Detector
from discern.scoring.thresholds import Rates
from discern.workflows.detect import DetectionModel, load_detection_model

DEFAULT_THRESHOLD = 0.5
_FORMAT = 1


@dataclass(frozen=True)
class CalibrateRequest:
    """What to calibrate on what.

    Attributes:
        model: a run, or an export or import that holds the generator too.
        data: data set whose held-out text is used, made with the model's tokenizer.
        precision: wanted, 0-1: share of the marked tokens that were replaced.
        corruption: share of the tokens to mask and fill, 0-1.
        sequences: held-out rows, evenly spread; 0: all.
    """

    model: Path
    data: Path
    precision: float = 0.9
    corruption: float = 0.15
    sequences: int = 2000


@dataclass(frozen=True)
class ChosenThreshold:
    """From which probability on a token is marked.

    Attributes:
        value: the probability.
        origin: 'given' by the user, 'calibrated' and found beside the model, or the 'default', one half.
        precision: that it was calibrated for; None where it was not.
    """

    value: float
    origin: Literal["given", "calibrated", "default"]
    precision: float | None = None

    @property
    def described(self) -> str:
        """In a few words."""
        return f"calibrated for precision {self.precision:g}" if self.precision is not None else self.origin


def calibrate(request: CalibrateRequest, progress: Progress, warn: Callable[[str], None]) -> dict[str, Any]:
    """Find the threshold that reaches a precision on held-out text that the model's own generator corrupted.

    Where some threshold does, it is kept in the model's folder, and `detect` goes by it from then on. Where none does, what is
    told is the most precise one, nothing is kept, and an earlier calibration is left as it was.

    Args:
        warn: told of damaged checkpoints that were passed over, and of a folder that cannot be written to.

    Raises:
        ConfigError: the model has no discriminator or no generator.
        DataError: the folder holds no model; the data set is missing, was made with another tokenizer, or holds too little out.
        CheckpointError: weights are missing or damaged.
    """
    model = load_detection_model(request.model, warn)
    if model.proposer is None:
        raise ConfigError(
            f"{request.model} holds no generator, which is what corrupts the text to calibrate on",
            hint="give the run, or export it again: discern export RUN --out DIR --all-networks",
        )
    data, stream = _heldout(request, model)
    progress.start("calibrating", min(request.sequences or stream.num_rows, stream.num_rows), "rows")
    try:
        judged = judge_corrupted(
            model.detector.network,
            model.proposer,
            stream,
            corruption=request.corruption,
            sequences=request.sequences,
            progress=progress,
        )
    finally:
        progress.finish()
    found = find_threshold(judged, request.precision)
    if found is None or not judged.is_replaced.any():
        raise DataError(
            f"{data.folder} holds too little out: {len(judged.probability):,} tokens, {int(judged.is_replaced.sum()):,} of them "
            f"replaced; a precision needs {FEWEST_MARKED} marked ones",
            hint="prepare the data again with a larger --heldout, or add more text",
        )
    values = {
        "reached": found.reached,
        "wanted_precision": found.wanted,
        **rate_values(found.rates),
        "precision_interval": list(found.rates.precision_interval()),
        **_measured_on(judged),
        "corruption": request.corruption,
        "data_fingerprint": data.fingerprint,
    }
    kept = found.reached and _keep(request.model, values, head_fingerprint(model.detector.network), warn)
    return {**values, "kept": request.model / CALIBRATION_NAME if kept else None}


def chosen_threshold(model: Path, detector: Detector, given: float | None, warn: Callable[[str], None]) -> ChosenThreshold:
    """The threshold that was given, or else the one kept beside the model if it is of these very weights, or else one half.

    Raises:
        DataError: the file beside the model is damaged.
    """
    if given is not None:
        return ChosenThreshold(given, "given")
    path = model / CALIBRATION_NAME
    if not path.is_file():
        return ChosenThreshold(DEFAULT_THRESHOLD, "default")
    kept = _read(path)
    if kept["head_fingerprint"] != head_fingerprint(detector.network):
        warn(f"{path} was calibrated for other weights: {DEFAULT_THRESHOLD:g} is the threshold; run --calibrate again")
        return ChosenThreshold(DEFAULT_THRESHOLD, "default")
    return ChosenThreshold(float(kept["threshold"]), "calibrated", float(kept["wanted_precision"]))


def rate_values(rates: Rates) -> dict[str, float | int]:
    """As JSON has them."""
    return {
        "threshold": rates.threshold,
        "precision": rates.precision,
        "recall": rates.recall,
        "f1": rates.f1,
        "marked": rates.marked,
        "hits": rates.hits,
    }


def _measured_on(judged: Judged) -> dict[str, float | int]:
    return {
        "auc": area_under_curve(judged.probability, judged.is_replaced),
        "tokens": len(judged.probability),
        "replaced": int(judged.is_replaced.sum()),
    }


def _heldout(request: CalibrateRequest, model: DetectionModel) -> tuple[TokenData, ExampleStream]:
    """The data set, and its held-out rows, as long as both networks can read."""
    data = TokenData.open(request.data)
    if data.tokenizer_fingerprint not in model.tokenizer_fingerprints:
        raise DataError(
            f"{request.data} was made with another tokenizer than {request.model}",
            hint=f"prepare it again: discern prepare TEXT --out DATA --tokenizer {request.model} --heldout 0.5",
        )
    split = data.split("heldout")
    if split.num_tokens == 0:
        raise DataError(
            f"{request.data} has no held-out split",
            hint="prepare it again with a larger --heldout; text that is one document needs --documents line, or more text",
        )
    rows = PackedRows(split, data.special_tokens, model.proposer_room + 2, 0, rotate=False)
    return data, ExampleStream(rows, 0, shuffle=False)


def _keep(model: Path, values: Mapping[str, Any], weights: str, warn: Callable[[str], None]) -> bool:
    """Write the file; a folder that cannot be written to is no reason to fail."""
    try:
        text = json.dumps({"format": _FORMAT, **values, "head_fingerprint": weights}, indent=1) + "\n"
        if (model / CHECKSUMS_NAME).is_file():
            write_recorded(model, {CALIBRATION_NAME: text})
        else:
            write_text(model / CALIBRATION_NAME, text)
    except OSError as problem:
        warn(f"the threshold is not kept: {model / CALIBRATION_NAME}: {problem.strerror}; give it with --threshold")
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    return read_record(path, _Kept, hint="delete it, calibrate again, or give --threshold", version=_FORMAT)


class _Kept(Record):
    """What the calibration of a detector must hold."""

    format: int
    threshold: Annotated[float, Field(ge=0, le=1)]
    wanted_precision: Annotated[float, Field(ge=0, le=1)]
    head_fingerprint: str
