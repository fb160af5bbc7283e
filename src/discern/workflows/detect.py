"""Which tokens of a text look replaced, by the discriminator of a run or of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from discern.data.tokenizer import load_tokenizer
from discern.errors import ConfigError, DataError
from discern.interop.huggingface import CONFIG_NAME, is_discriminator, network_from_huggingface
from discern.interop.tokenizer import read_max_length
from discern.model.heads import ReplacedTokenHead
from discern.progress import Progress
from discern.scoring.detection import Detection, Detector, detect_replaced
from discern.workflows.runs import is_run, load_run


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
    if is_run(model):
        return _from_run(model, warn)
    if not (model / CONFIG_NAME).is_file():
        state = "does not exist" if not model.exists() else f"holds neither a run nor a {CONFIG_NAME}"
        raise DataError(f"{model} {state}", hint="give the folder of a run, or what `discern export RUN --out DIR` wrote")
    if not is_discriminator(model):
        raise ConfigError(
            f"{model} holds no discriminator: it is a generator, or was fine-tuned for something else",
            hint="give the run itself, or export it again with --network discriminator",
        )
    network = network_from_huggingface(model)
    return Detector(network, load_tokenizer(model), read_max_length(model, network.encoder.config.max_positions))


def _from_run(folder: Path, warn: Callable[[str], None]) -> Detector:
    run = load_run(folder, warn=warn)
    judges = [network for network in run.objective.networks().values() if isinstance(network.head, ReplacedTokenHead)]
    if not judges:
        raise ConfigError(
            f"{folder} was trained with objective '{run.config.objective.name}', which has no discriminator",
            hint="detect needs a run of objective 'rtd', as preset electra-small has it",
        )
    length = min(run.config.data.sequence_length, run.config.model.max_positions)
    return Detector(judges[0], load_tokenizer(run.tokenizer_path), length)
