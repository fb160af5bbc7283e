"""The probability that each token of a text was replaced, by the discriminator of a model folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Encoding, Tokenizer

from discern.artifacts.model_folder import ModelFolder
from discern.artifacts.opening import open_model
from discern.data.tokenizer import special_tokens
from discern.data.tokenizer.plain_text import encode_texts
from discern.data.tokenizer.unknown import UnknownTokens
from discern.errors import CheckpointError, ConfigError
from discern.inference.proposals import Proposer, proposer_of
from discern.inference.rows import TOKENS_PER_BATCH, batches, best_places, device_of, finite, framed, moved, windows_of
from discern.inference.texts import InputText
from discern.models.base import Network
from discern.models.heads import EnergyHead, MaskedLMHead, ReplacedTokenHead
from discern.progress import Progress
from discern.training.distributed import choose_device


@dataclass(frozen=True)
class Detection:
    """Predictions of the discriminator for one text, without special tokens.

    Attributes:
        text: the text, unchanged.
        tokens: tokens as in the vocabulary.
        offsets: (start, end) of each token in the text, in characters.
        replaced_probability: probability that each token was replaced, in 0-1.
    """

    text: str
    tokens: list[str]
    offsets: list[tuple[int, int]]
    replaced_probability: list[float]


@dataclass(frozen=True)
class Detector:
    """A discriminator, in evaluation mode, with its tokenizer.

    Attributes:
        max_length: number of positions it was trained on, including [CLS] and [SEP]; at least 3.
    """

    network: Network
    tokenizer: Tokenizer
    max_length: int

    @property
    def window_size(self) -> int:
        """Number of tokens of text that are read at a time."""
        return self.max_length - 2


def detect_replaced(
    detector: Detector,
    texts: Sequence[str],
    encodings: Sequence[Encoding],
    advance: Callable[[int], None],
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> list[Detection]:
    """The probability of every token.

    A text of more than `detector.window_size` tokens is read in overlapping windows; each token is predicted where it has most
    context.

    Args:
        encodings: encodings of the texts, without special tokens.
        advance: called with the number of further tokens that are done.
        tokens_per_batch: maximum number of tokens of a forward pass, including padding; it changes the last digits at most.
    """
    found = [[0.0] * len(encoding) for encoding in encodings]
    windows = windows_of([len(encoding) for encoding in encodings], detector.window_size)
    counting = best_places(windows)
    for batch in batches([window.stop - window.start + 2 for window in windows], tokens_per_batch):
        ids = [encodings[windows[number].text].ids[windows[number].start : windows[number].stop] for number in batch]
        for number, probabilities in zip(batch, _probabilities(detector, ids), strict=True):
            window = windows[number]
            for place in counting[number]:
                found[window.text][window.start + place] = probabilities[place]
        advance(sum(len(counting[number]) for number in batch))
    return [
        Detection(text, encoding.tokens, encoding.offsets, probabilities)
        for text, encoding, probabilities in zip(texts, encodings, found, strict=True)
    ]


@torch.inference_mode()
def _probabilities(detector: Detector, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Probabilities of the tokens of texts that fit in one window, given as ids."""
    input_ids, mask = framed(texts, special_tokens(detector.tokenizer), device_of(detector.network))
    logits = finite(detector.network.token_logits(input_ids, mask), mask)
    return [row[1 : len(ids) + 1] for row, ids in zip(logits.sigmoid().tolist(), texts, strict=True)]


TextT = TypeVar("TextT", bound=InputText)

_GENERATOR = "generator"
# Size of a block: large enough that texts of similar length can share a batch.
_TEXTS, _CHARACTERS = 512, 1 << 18


@dataclass(frozen=True)
class DetectionModel:
    """A discriminator with its generator.

    Attributes:
        detector: the discriminator with its tokenizer.
        proposer: the generator; None if the folder has none.
        proposer_window: number of tokens of text that the generator reads at a time; 0 without a generator.
        tokenizer_fingerprints: fingerprints of the tokenizers that give the same ids.
    """

    detector: Detector
    proposer: Proposer | None
    proposer_window: int
    tokenizer_fingerprints: tuple[str, ...]


def detect(model: Path, texts: Sequence[str], progress: Progress, warn: Callable[[str], None]) -> list[Detection]:
    """The probability that each token was replaced, in float32; one result per text, in order.

    Args:
        model: folder of a run, an export, or a Hugging Face ELECTRA discriminator.
        warn: called with messages about texts that are read in several windows and damaged checkpoints that were skipped.

    Raises:
        ConfigError: the model has no discriminator.
        DataError: the folder is neither a run nor a model, or has no tokenizer.
        CheckpointError: the weights are missing or damaged.
    """
    detector = load_detector(model, warn)
    encodings = encode_texts(detector.tokenizer, texts)
    too_long = sum(len(encoding) > detector.window_size for encoding in encodings)
    if too_long:
        which = "the text is" if len(texts) == 1 else f"{too_long} of {len(texts)} texts are"
        warn(f"{which} longer than the {detector.window_size} tokens that the model was trained on: read in overlapping windows")
    progress.start("detecting", sum(map(len, encodings)), "tokens")
    found = detect_replaced(detector, texts, encodings, progress.advance)
    progress.finish()
    unknown = UnknownTokens(detector.tokenizer)
    for encoding in encodings:
        unknown.add_ids(encoding.ids)
    unknown.report(progress.note, warn)
    return found


def detect_each(
    detector: Detector, texts: Iterable[TextT], progress: Progress, warn: Callable[[str], None]
) -> Iterator[tuple[TextT, Detection]]:
    """Each text with its result, in order; memory is bounded.

    Args:
        warn: called about the first text that is read in several windows and, at the end, about the number of such texts and a
            high fraction of unknown tokens.
    """
    progress.start("detecting", None, "tokens")
    longer = done = 0
    unknown = UnknownTokens(detector.tokenizer)
    try:
        for block in _blocks(texts):
            encodings = encode_texts(detector.tokenizer, [each.text for each in block])
            for each, encoding in zip(block, encodings, strict=True):
                unknown.add_ids(encoding.ids)
                if len(encoding) > detector.window_size:
                    if not longer:
                        warn(f"{each.where}: {_too_long(len(encoding), detector.window_size)}")
                    longer += 1
            found = detect_replaced(detector, [each.text for each in block], encodings, progress.advance)
            done += len(block)
            yield from zip(block, found, strict=True)
    finally:
        progress.finish()
    if longer > 1:
        warn(f"{longer:,} of {done:,} texts were read in several windows")
    unknown.report(progress.note, warn)


def load_detector(model: Path | ModelFolder, warn: Callable[[str], None], device: str = "auto") -> Detector:
    """Load the discriminator of a model folder; raises the errors of `detect`."""
    place, loaded = choose_device(device), open_model(model, warn=warn)
    return _detector(loaded, loaded.networks(beside=False), place)


def load_detection_model(model: Path, warn: Callable[[str], None], device: str = "auto") -> DetectionModel:
    """Load the discriminator of a model folder, and its generator if there is one; raises the errors of `detect`."""
    place, loaded = choose_device(device), open_model(model, warn=warn)
    networks, fingerprints = loaded.networks(), loaded.tokenizer_fingerprints
    detector = _detector(loaded, networks, place)
    generator = networks.get(_GENERATOR)
    if generator is None or not isinstance(generator.head, MaskedLMHead):
        return DetectionModel(detector, None, 0, fingerprints)
    _check_vocabularies(model, detector.network, generator)
    window_size = min(detector.max_length, generator.encoder.config.max_positions) - 2
    proposer = proposer_of(moved(generator, place), special_tokens(detector.tokenizer))
    return DetectionModel(detector, proposer, window_size, fingerprints)


def _detector(model: ModelFolder, networks: Mapping[str, Network], device: torch.device) -> Detector:
    discriminators = [network for network in networks.values() if isinstance(network.head, ReplacedTokenHead)]
    if not discriminators:
        energies = any(isinstance(network.head, EnergyHead) for network in networks.values())
        does = "computes energies, not probabilities" if energies else "fills masks"
        raise ConfigError(
            f"{model.folder} has no discriminator: its {' and '.join(networks)} {does}",
            hint="give a run of objective 'rtd', or its export: discern export RUN --out DIR --network discriminator",
        )
    return Detector(moved(discriminators[0], device), model.tokenizer, model.max_length)


def _check_vocabularies(model: Path, discriminator: Network, generator: Network) -> None:
    sizes = [network.encoder.embeddings.weights.shape[0] for network in (discriminator, generator)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{model}: the discriminator has {sizes[0]:,} tokens and the generator {sizes[1]:,}; they don't belong together",
            hint=f"put the generator of this discriminator into {model / _GENERATOR}",
        )


def _blocks(texts: Iterable[TextT]) -> Iterator[list[TextT]]:
    block: list[TextT] = []
    characters = 0
    for each in texts:
        block.append(each)
        characters += len(each.text)
        if len(block) >= _TEXTS or characters >= _CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _too_long(tokens: int, window_size: int) -> str:
    return (
        f"{tokens:,} tokens, and the model was trained on {window_size:,} at a time: read in overlapping windows, "
        "each token where it has most context"
    )
