"""Texts as vectors: hidden states of the encoder, one per token or one per text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from discern.data.tokenizer import special_tokens
from discern.data.tokenizer.tokens import encode_texts
from discern.errors import ConfigError
from discern.inference.rows import TextModel, TextWindow, batches, best_places, framed, read, windows_of
from discern.models.base import Encoder

States: TypeAlias = Float[np.ndarray, "T D"]


@dataclass(frozen=True)
class VectorSettings:
    """What the vector of a text is, unless the user asks for something else.

    Attributes:
        pooling: one of `POOLINGS`.
        normalize: whether vectors have length 1.
        sizes: smaller sizes that the model was trained for.
        trained: whether the model was trained for its vectors.
    """

    pooling: str = "mean"
    normalize: bool = False
    sizes: tuple[int, ...] = ()
    trained: bool = False


@dataclass(frozen=True)
class Reader(TextModel):
    """An encoder."""

    encoder: Encoder


def token_states(reader: Reader, texts: Sequence[str], warn: Callable[[str], None]) -> list[States]:
    """The state of every token of each text, without [CLS] and [SEP]; float32.

    A text of more than `reader.window_size` tokens is read in overlapping windows; each token is taken from the window where it
    has most context.

    Args:
        warn: called about such texts.
    """
    ids = _ids(reader, texts)
    _tell(reader, ids, "read in overlapping windows", warn)
    width = reader.encoder.config.hidden_size
    found = [np.zeros((len(each), width), np.float32) for each in ids]
    windows = windows_of([len(each) for each in ids], reader.window_size)
    counting = best_places(windows)
    for number, states in _read(reader, ids, windows):
        window, places = windows[number], list(counting[number])
        found[window.text][[window.start + place for place in places]] = states[1:-1][places]
    return found


POOLINGS = ("mean", "mean-all", "first", "cls")
"""The ways to make a vector from the states of a text; 'first' and 'cls' are the same."""


def text_vectors(
    reader: Reader, texts: Sequence[str], settings: VectorSettings, size: int | None, warn: Callable[[str], None]
) -> Float[np.ndarray, "N S"]:
    """The vector of each text; zeros for the mean of a text without tokens.

    Only "mean" reads the whole of a long text. The other poolings include the state of [CLS], a summary of the text in fine-tuned
    encoders, and truncate texts to `reader.window_size` tokens.

    Args:
        size: number of first components to keep, before vectors are normalized; None: all.
    """
    vectors = np.zeros((len(texts), reader.encoder.config.hidden_size), np.float32)
    if settings.pooling == "mean":
        for number, states in enumerate(token_states(reader, texts, warn)):
            if len(states):
                vectors[number] = states.mean(0)
    else:
        ids = _ids(reader, texts)
        _tell(reader, ids, "the rest is not read", warn)
        windows = [TextWindow(number, 0, min(len(each), reader.window_size), len(each)) for number, each in enumerate(ids)]
        for number, states in _read(reader, ids, windows):
            vectors[number] = states.mean(0) if settings.pooling == "mean-all" else states[0]
    return unit_vectors(vectors[:, :size]) if settings.normalize else vectors[:, :size]


def unit_vectors(vectors: Float[np.ndarray, "N S"]) -> Float[np.ndarray, "N S"]:
    """The vectors with length 1; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: np.ndarray = vectors / np.where(lengths > 0, lengths, 1)
    return scaled


def chosen_settings(
    trained: VectorSettings, pooling: str, normalize: bool | None, size: int | None, width: int
) -> VectorSettings:
    """The settings of a model, overridden by what the user asks for.

    Args:
        pooling: 'auto', or one of `POOLINGS`.
        normalize: None: as the model was trained.
        size: number of components to keep; None: all.
        width: number of components of the model's vectors.

    Raises:
        ConfigError: there is no such pooling, or the vectors have fewer components.
    """
    if pooling not in ("auto", *POOLINGS):
        raise ConfigError(f"unknown pooling {pooling!r}", hint="one of 'auto', 'mean', 'mean-all', 'cls', 'none'")
    if size is not None and not 1 <= size <= width:
        raise ConfigError(
            f"{size} components are asked for, and the vectors of this model have {width}", hint=f"give a size from 1 to {width}"
        )
    chosen = replace(trained, pooling=trained.pooling if pooling == "auto" else pooling)
    return chosen if normalize is None else replace(chosen, normalize=normalize)


def _ids(reader: Reader, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in encode_texts(reader.tokenizer, texts, ids_only=True)]


def _read(reader: Reader, ids: Sequence[Sequence[int]], windows: Sequence[TextWindow]) -> Iterator[tuple[int, States]]:
    """The index of each window with its states, including those of [CLS] and [SEP], in any order."""
    for batch in batches([window.stop - window.start + 2 for window in windows]):
        chosen = [windows[number] for number in batch]
        states = _states(reader, [ids[each.text][each.start : each.stop] for each in chosen])
        for number, window, row in zip(batch, chosen, states, strict=True):
            yield number, row[: window.stop - window.start + 2]


@torch.inference_mode()
def _states(reader: Reader, rows: Sequence[Sequence[int]]) -> Float[np.ndarray, "B L D"]:
    """The states of rows, which are framed and padded."""
    device = reader.encoder.embeddings.weights.device
    states: Tensor = read(reader.encoder, *framed(rows, special_tokens(reader.tokenizer), device))
    found: np.ndarray = states.float().cpu().numpy()
    return found


def _tell(reader: Reader, ids: Sequence[Sequence[int]], what: str, warn: Callable[[str], None]) -> None:
    too_long = sum(len(each) > reader.window_size for each in ids)
    if too_long:
        length = reader.window_size
        warn(f"{too_long} of {len(ids)} texts are longer than the {length} tokens that the model was trained on: {what}")
