"""The threshold of a detector: found on corrupted held-out text, kept beside the model, and looked up there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discern.corruption.masking import MaskingContext, sample_tokens, uniform
from discern.corruption.randomness import Randomness, key_of
from discern.data.batching.segments import ExampleStream, PackedRows
from discern.data.dataset.shards import TokenData
from discern.errors import ConfigError, DataError
from discern.inference.detection import CALIBRATION_FORMAT, DetectionModel, head_fingerprint, load_detection_model
from discern.inference.proposals import Proposer
from discern.inference.rows import TOKENS_PER_BATCH, device_of
from discern.inference.threshold_curve import ThresholdCurve
from discern.model_files.hub import CALIBRATION_NAME
from discern.models.base import Network
from discern.objectives.metrics import area_under_curve
from discern.progress import Progress
from discern.storage.checksums import write_json
from discern.types import TokenBatch

# The corruption is the same for every model, so that thresholds differ only because networks do.
_SEED = key_of("calibration")
MIN_MARKED = 20
"""Number of marked tokens below which a precision is considered chance."""


@dataclass(frozen=True)
class TokenPredictions:
    """Predictions of a detector on corrupted text, without special tokens and padding.

    Attributes:
        probability: (T,) predicted probability that each token was replaced.
        is_replaced: (T,) whether it was; a sample equal to the original token counts as original.
    """

    probability: NDArray[np.float32]
    is_replaced: NDArray[np.bool_]


@torch.inference_mode()
def detect_corrupted(
    discriminator: Network,
    proposer: Proposer,
    stream: ExampleStream,
    *,
    corruption: float,
    sequences: int,
    progress: Progress,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> TokenPredictions:
    """Corrupt rows with samples of the generator, as in training, and let the discriminator predict every token.

    Positions and samples depend on the row alone, not on how rows are batched.

    Args:
        corruption: fraction of the tokens to mask and fill, in 0-1; at least one per row.
        sequences: number of rows, evenly spaced; 0: all.
        progress: advanced by rows.

    Reference: Clark et al. 2020, section 2; samples at temperature 1.
    """
    count = min(sequences, stream.num_rows) if sequences else stream.num_rows
    chosen = np.unique(np.linspace(0, stream.num_rows - 1, count).astype(np.int64))
    size = max(1, tokens_per_batch // stream.batch(chosen[:1], chosen[:1]).input_ids.shape[1])
    device = device_of(discriminator)
    probability, is_replaced = [], []
    for start in range(0, len(chosen), size):
        rows = chosen[start : start + size]
        batch = stream.batch(rows, rows)
        corrupted = _corrupted(proposer, batch, corruption)
        logits = discriminator.token_logits(corrupted.to(device), *batch.to(device).context).cpu()
        predicted = batch.maskable
        probability.append(logits[predicted].sigmoid().numpy())
        is_replaced.append((corrupted != batch.input_ids)[predicted].numpy())
        progress.advance(len(rows))
    return TokenPredictions(np.concatenate(probability), np.concatenate(is_replaced))


def _corrupted(proposer: Proposer, batch: TokenBatch, corruption: float) -> Tensor:
    """(B, L) The rows with samples at the chosen positions."""
    randomness = Randomness(_SEED, 0, batch.example_index)
    places = uniform(batch, MaskingContext(corruption, randomness)).positions
    uniforms = randomness.uniforms("replacements", places.shape[1])[places]
    sampled, at = [], 0
    for logits in proposer.logits(batch.input_ids, places, *batch.to(device_of(proposer.network)).context):
        sampled.append(sample_tokens(logits, uniforms[at : at + len(logits)]))
        at += len(logits)
    return batch.input_ids.masked_scatter(places, torch.cat(sampled)) if sampled else batch.input_ids


def calibrate(
    model: Path,
    data: Path,
    progress: Progress,
    warn: Callable[[str], None],
    *,
    precision: float = 0.9,
    corruption: float = 0.15,
    sequences: int = 2000,
    device: str = "auto",
) -> dict[str, Any]:
    """Find the threshold that reaches a precision on held-out text that the model's own generator corrupted.

    If there is one, it is stored in the model's folder, and `detect` uses it from then on. If not, the result is the most precise
    threshold, nothing is stored, and an earlier calibration is kept.

    Args:
        model: a run, or an export or import that also has the generator.
        data: data set with held-out text, made with the model's tokenizer.
        warn: called with messages about damaged checkpoints that were skipped and a folder that cannot be written to.
        precision: wanted fraction of the marked tokens that are replaced, in 0-1.
        corruption: fraction of the tokens to mask and fill, in 0-1.
        sequences: number of held-out rows, evenly spaced; 0: all.

    Raises:
        ConfigError: the model has no discriminator or no generator.
        DataError: the folder has no model; the data set is missing, has another tokenizer, or too little held-out text.
        CheckpointError: the weights are missing or damaged.
    """
    loaded = load_detection_model(model, warn, device)
    if loaded.proposer is None:
        raise ConfigError(
            f"{model} has no generator, which is needed to corrupt the calibration text",
            hint="give the run, or export it again: discern export RUN --out DIR --all-networks",
        )
    data_set, stream = _heldout(data, model, loaded)
    progress.start("calibrating", min(sequences or stream.num_rows, stream.num_rows), "rows")
    try:
        predictions = detect_corrupted(
            loaded.detector.network, loaded.proposer, stream, corruption=corruption, sequences=sequences, progress=progress
        )
    finally:
        progress.finish()
    curve = ThresholdCurve(predictions.probability, predictions.is_replaced)
    reached = curve.reaching(precision, MIN_MARKED)
    rates = reached or curve.most_precise(MIN_MARKED)
    if rates is None or not predictions.is_replaced.any():
        raise DataError(
            f"{data_set.folder} has too little held-out text: {len(predictions.probability):,} tokens, "
            f"{int(predictions.is_replaced.sum()):,} of them replaced; calibration needs {MIN_MARKED} marked tokens",
            hint="prepare the data again with a larger --heldout, or add more text",
        )
    values = {
        "reached": reached is not None,
        "wanted_precision": precision,
        **vars(rates),
        "precision_interval": list(rates.precision_interval()),
        "auc": area_under_curve(predictions.probability, predictions.is_replaced),
        "tokens": len(predictions.probability),
        "replaced": int(predictions.is_replaced.sum()),
        "corruption": corruption,
        "data_fingerprint": data_set.fingerprint,
    }
    kept = reached is not None and _keep(model, values, head_fingerprint(loaded.detector.network), warn)
    return {**values, "kept": model / CALIBRATION_NAME if kept else None}


def _heldout(folder: Path, model: Path, loaded: DetectionModel) -> tuple[TokenData, ExampleStream]:
    """The data set and its held-out rows, of the length that both networks can read."""
    data = TokenData.open(folder)
    if data.tokenizer_fingerprint not in loaded.tokenizer_fingerprints:
        raise DataError(
            f"{folder} was made with a different tokenizer from that of {model}",
            hint=f"prepare it again: discern prepare TEXT --out DATA --tokenizer {model} --heldout 0.5",
        )
    split = data.split("heldout")
    if split.num_tokens == 0:
        raise DataError(
            f"{folder} has no held-out split",
            hint="prepare it again with a larger --heldout; text that is one document needs --documents line, or more text",
        )
    rows = PackedRows(split, data.special_tokens, loaded.detector.max_length, 0, rotate=False)
    return data, ExampleStream(rows, 0, shuffle=False)


def _keep(model: Path, values: Mapping[str, Any], weights: str, warn: Callable[[str], None]) -> bool:
    """Store the threshold; return False, with a warning, if the folder cannot be written to."""
    try:
        write_json(model / CALIBRATION_NAME, {"format": CALIBRATION_FORMAT, **values, "head_fingerprint": weights})
    except OSError as problem:
        warn(
            f"the threshold could not be stored in {model / CALIBRATION_NAME}: {problem.strerror}; give it with --threshold "
            f"instead"
        )
        return False
    return True
