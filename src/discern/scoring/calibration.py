"""The threshold from which a detector's marks are right as often as one asks, found on text that a generator corrupted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discern.corruption.masking import MaskingContext, maskable_positions, uniform
from discern.corruption.randomness import Randomness, key_of
from discern.corruption.sampling import replace_positions, sample_tokens
from discern.data.stream import ExampleStream
from discern.model.network import Network
from discern.objectives.replacement import context_of
from discern.progress import Progress
from discern.scoring.proposals import Proposer
from discern.scoring.rows import TOKENS_PER_BATCH
from discern.scoring.thresholds import Rates, ThresholdCurve
from discern.types import TokenBatch

# The same corruption for every model: thresholds then differ because the networks do.
_SEED = key_of("calibration")
FEWEST_MARKED = 20
"""Marked tokens below which a precision is taken for chance."""


@dataclass(frozen=True)
class Judged:
    """A detector's answers on corrupted text, special tokens and padding left out.

    Attributes:
        probability: (T,) of each token, that it was replaced.
        is_replaced: (T,) whether it was; a sample that is the original token counts as original.
    """

    probability: NDArray[np.float32]
    is_replaced: NDArray[np.bool_]


@dataclass(frozen=True)
class Threshold:
    """What a search for a precision found.

    Attributes:
        wanted: the precision that was asked for.
        reached: whether some threshold has it.
        rates: of that threshold; where none has it, of the most precise one.
    """

    wanted: float
    reached: bool
    rates: Rates


def find_threshold(judged: Judged, precision: float, fewest: int = FEWEST_MARKED) -> Threshold | None:
    """The threshold of this precision that has the highest recall, or else the most precise one; None: too few tokens.

    Args:
        fewest: thresholds that mark less are left out.
    """
    curve = ThresholdCurve(judged.probability, judged.is_replaced)
    found = curve.reaching(precision, fewest)
    if found is not None:
        return Threshold(precision, True, found)
    best = curve.most_precise(fewest)
    return None if best is None else Threshold(precision, False, best)


@torch.inference_mode()
def judge_corrupted(
    judge: Network,
    proposer: Proposer,
    stream: ExampleStream,
    *,
    corruption: float,
    sequences: int,
    progress: Progress,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> Judged:
    """Corrupt rows with the generator's samples, as in training, and ask the discriminator about every token.

    Positions and samples depend on the row alone, not on how rows are batched.

    Args:
        corruption: share of the tokens to mask and fill, 0-1; at least one a row.
        sequences: how many rows, evenly spread; 0: all.
        progress: told of rows.

    Reference: Clark et al. 2020, section 2; samples at temperature 1.
    """
    count = min(sequences, stream.num_rows) if sequences else stream.num_rows
    chosen = np.unique(np.linspace(0, stream.num_rows - 1, count).astype(np.int64))
    size = max(1, tokens_per_batch // stream.batch(chosen[:1], chosen[:1]).input_ids.shape[1])
    probability, is_replaced = [], []
    for start in range(0, len(chosen), size):
        rows = chosen[start : start + size]
        batch = stream.batch(rows, rows)
        corrupted = _corrupted(proposer, batch, corruption)
        logits = judge.token_logits(corrupted, *context_of(batch))
        asked = maskable_positions(batch)
        probability.append(logits[asked].sigmoid().numpy())
        is_replaced.append((corrupted != batch.input_ids)[asked].numpy())
        progress.advance(len(rows))
    return Judged(np.concatenate(probability), np.concatenate(is_replaced))


def head_fingerprint(network: Network) -> str:
    """sha256 over the weights of a network's head: they change with every step of training, and are few."""
    digest = hashlib.sha256()
    parts = [part for part in (network.head, network.bilinear) if part is not None]
    for tensor in (tensor for part in parts for tensor in part.parameters()):
        digest.update(tensor.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _corrupted(proposer: Proposer, batch: TokenBatch, corruption: float) -> Tensor:
    """(B, L) the rows with samples at the chosen positions."""
    randomness = Randomness(_SEED, 0, batch.example_index)
    places = uniform(batch, MaskingContext(corruption, randomness)).positions
    uniforms = randomness.uniforms("replacements", places.shape[1])[places]
    sampled, at = [], 0
    for logits in proposer.logits(batch.input_ids, places, *context_of(batch)):
        sampled.append(sample_tokens(logits, uniforms[at : at + len(logits)]))
        at += len(logits)
    return replace_positions(batch.input_ids, places, torch.cat(sampled)) if sampled else batch.input_ids
