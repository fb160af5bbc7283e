"""Which tokens of a text look replaced, by the discriminator of a run or of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.data.unknown import UnknownTokens
from discern.errors import CheckpointError, ConfigError
from discern.model.heads import EnergyHead, MaskedLMHead, ReplacedTokenHead
from discern.model.network import Network
from discern.progress import Progress
from discern.scoring.detection import Detection, Detector, detect_replaced
from discern.scoring.proposals import Proposer, proposer_of
from discern.workflows.detect_input import InputText
from discern.workflows.models import LoadedModel, load_model

TextT = TypeVar("TextT", bound=InputText)

_GENERATOR = "generator"
# What is held at a time: enough that texts of like length are found to share a batch.
_TEXTS, _CHARACTERS = 512, 1 << 18


@dataclass(frozen=True)
class DetectionModel:
    """A discriminator, and the generator that came with it.

    Attributes:
        detector: the discriminator with its tokenizer.
        proposer: asks the generator; None where the folder holds none.
        proposer_room: tokens of text that the generator takes at a time; 0 without one.
        tokenizer_fingerprints: of the tokenizers that give its ids.
    """

    detector: Detector
    proposer: Proposer | None
    proposer_room: int
    tokenizer_fingerprints: tuple[str, ...]


def detect(model: Path, texts: Sequence[str], progress: Progress, warn: Callable[[str], None]) -> list[Detection]:
    """The probability that each token was replaced, computed in float32; one detection a text, in order.

    Args:
        model: folder of a run, of an export, or of a Hugging Face ELECTRA discriminator.
        warn: told of texts longer than the model was trained for, and of damaged checkpoints that were passed over.

    Raises:
        ConfigError: the model has no discriminator.
        DataError: the folder holds neither a run nor a model, or no tokenizer.
        CheckpointError: its weights are missing or damaged.
    """
    detector = load_detector(model, warn)
    encodings = detector.tokenizer.encode_batch(list(texts), add_special_tokens=False)
    too_long = sum(len(encoding) > detector.room for encoding in encodings)
    if too_long:
        which = "the text is" if len(texts) == 1 else f"{too_long} of {len(texts)} texts are"
        warn(f"{which} longer than the {detector.room} tokens that the model was trained on: judged in overlapping windows")
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
    """Every text with what is said of it, in order; some hundreds are held at a time, however many there are.

    Args:
        warn: told of the first text that is judged in several windows, and in the end of how many were and of a high share of
            unknown tokens.
    """
    progress.start("detecting", None, "tokens")
    longer = done = 0
    unknown = UnknownTokens(detector.tokenizer)
    try:
        for block in _blocks(texts):
            encodings = detector.tokenizer.encode_batch([each.text for each in block], add_special_tokens=False)
            for each, encoding in zip(block, encodings, strict=True):
                unknown.add_ids(encoding.ids)
                if len(encoding) > detector.room:
                    if not longer:
                        warn(f"{each.where}: {_too_long(len(encoding), detector.room)}")
                    longer += 1
            found = detect_replaced(detector, [each.text for each in block], encodings, progress.advance)
            done += len(block)
            yield from zip(block, found, strict=True)
    finally:
        progress.finish()
    if longer > 1:
        warn(f"{longer:,} of {done:,} texts were judged in several windows")
    unknown.report(progress.note, warn)


def load_detector(model: Path, warn: Callable[[str], None]) -> Detector:
    """The discriminator in a folder; raises as `detect` does."""
    return _detector(model, load_model(model, warn=warn))


def load_detection_model(model: Path, warn: Callable[[str], None]) -> DetectionModel:
    """The discriminator in a folder, and the generator where there is one; raises as `detect` does."""
    loaded = load_model(model, beside=True, warn=warn)
    detector = _detector(model, loaded)
    fingerprints = loaded.tokenizer_fingerprints(detector.tokenizer)
    generator = loaded.networks.get(_GENERATOR)
    if generator is None or not isinstance(generator.head, MaskedLMHead):
        return DetectionModel(detector, None, 0, fingerprints)
    _check_vocabularies(model, detector.network, generator)
    room = min(detector.max_length, generator.encoder.config.max_positions) - 2
    proposer = proposer_of(generator, special_tokens(detector.tokenizer))
    return DetectionModel(detector, proposer, room, fingerprints)


def _detector(model: Path, loaded: LoadedModel) -> Detector:
    judges = [network for network in loaded.networks.values() if isinstance(network.head, ReplacedTokenHead)]
    if not judges:
        energies = any(isinstance(network.head, EnergyHead) for network in loaded.networks.values())
        does = "gives energies, no probabilities" if energies else "fills masks"
        raise ConfigError(
            f"{model} holds no discriminator: its {' and '.join(loaded.networks)} {does}",
            hint="give a run of objective 'rtd', or what `discern export RUN --out DIR --network discriminator` writes",
        )
    return Detector(judges[0], load_tokenizer(loaded.tokenizer_path), loaded.max_length)


def _check_vocabularies(model: Path, judge: Network, generator: Network) -> None:
    sizes = [network.encoder.embeddings.weights.shape[0] for network in (judge, generator)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{model}: the discriminator knows {sizes[0]:,} tokens and the generator {sizes[1]:,}; they don't belong together",
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


def _too_long(tokens: int, room: int) -> str:
    return (
        f"{tokens:,} tokens, and the model was trained on {room:,} at a time: judged in overlapping windows, "
        "each token where it has most context"
    )
