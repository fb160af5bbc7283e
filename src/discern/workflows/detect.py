"""Which tokens of a text look replaced, by the discriminator of a run or of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from discern.data.tokenizer import load_tokenizer
from discern.errors import ConfigError
from discern.model.heads import EnergyHead, ReplacedTokenHead
from discern.progress import Progress
from discern.scoring.detection import Detection, Detector, detect_replaced
from discern.workflows.models import load_model


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
    return found


def load_detector(model: Path, warn: Callable[[str], None]) -> Detector:
    """The discriminator in a folder; raises as `detect` does."""
    loaded = load_model(model, warn=warn)
    judges = [network for network in loaded.networks.values() if isinstance(network.head, ReplacedTokenHead)]
    if not judges:
        energies = any(isinstance(network.head, EnergyHead) for network in loaded.networks.values())
        does = "gives energies, no probabilities" if energies else "fills masks"
        raise ConfigError(
            f"{model} holds no discriminator: its {' and '.join(loaded.networks)} {does}",
            hint="give a run of objective 'rtd', or what `discern export RUN --out DIR --network discriminator` writes",
        )
    return Detector(judges[0], load_tokenizer(loaded.tokenizer_path), loaded.max_length)
