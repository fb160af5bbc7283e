"""Detects replaced tokens with the discriminator of a model folder, and writes JSON lines and pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from tokenizers import Encoding

from discern.data.tokenizer import TokenTexts, special_tokens
from discern.data.tokenizer.tokens import encode_texts
from discern.errors import CheckpointError, ConfigError
from discern.inference.proposals import Proposer, propose
from discern.inference.rows import TOKENS_PER_BATCH, TextModel, batches, best_places, device_of, finite, framed, moved, windows_of
from discern.inference.texts import InputText, TextReport
from discern.model_files.folder import ModelFolder, fingerprint_weights, open_model
from discern.model_files.hub import CALIBRATION_NAME
from discern.models.base import Network
from discern.progress import Progress
from discern.report.detection_page import CheckedText, DetectionPage, PlaceProposals, render_detections
from discern.report.page import ShadedText
from discern.storage.checksums import Record, read_json
from discern.storage.files import whole_file
from discern.storage.output import check_output
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
class Detector(TextModel):
    """A discriminator."""

    network: Network


@torch.inference_mode()
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
    special, device = special_tokens(detector.tokenizer), device_of(detector.network)
    found = [[0.0] * len(encoding) for encoding in encodings]
    windows = windows_of([len(encoding) for encoding in encodings], detector.window_size)
    counting = best_places(windows)
    for batch in batches([window.stop - window.start + 2 for window in windows], tokens_per_batch):
        ids = [encodings[windows[number].text].ids[windows[number].start : windows[number].stop] for number in batch]
        input_ids, mask = framed(ids, special, device)
        logits = finite(detector.network.token_logits(input_ids, mask), mask)
        for number, probabilities in zip(batch, logits.sigmoid().tolist(), strict=True):
            window = windows[number]
            for place in counting[number]:
                found[window.text][window.start + place] = probabilities[place + 1]
        advance(sum(len(counting[number]) for number in batch))
    return [
        Detection(text, encoding.tokens, encoding.offsets, probabilities)
        for text, encoding, probabilities in zip(texts, encodings, found, strict=True)
    ]


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
        tokenizer_fingerprints: fingerprints of the tokenizers that give the same ids.
    """

    detector: Detector
    proposer: Proposer | None
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
    return detect_all(load_detector(model, warn), texts, progress, warn)


def detect_all(detector: Detector, texts: Sequence[str], progress: Progress, warn: Callable[[str], None]) -> list[Detection]:
    """Like `detect`, with a loaded discriminator."""
    numbered = (InputText(f"text {number}", number, text) for number, text in enumerate(texts, 1))
    return [detection for _, detection in detect_each(detector, numbered, progress, warn)]


def detect_each(
    detector: Detector, texts: Iterable[TextT], progress: Progress, warn: Callable[[str], None]
) -> Iterator[tuple[TextT, Detection]]:
    """Each text with its result, in order; memory is bounded.

    Args:
        warn: called about the first text that is read in several windows and, at the end, about the number of such texts and a
            high fraction of unknown tokens.
    """
    progress.start("detecting", None, "tokens")
    report = TextReport(detector.tokenizer, detector.window_size, progress, warn)
    try:
        for block in _blocks(texts):
            encodings = encode_texts(detector.tokenizer, [each.text for each in block])
            for each, encoding in zip(block, encodings, strict=True):
                report.add(each.where, encoding.tokens)
            found = detect_replaced(detector, [each.text for each in block], encodings, progress.advance)
            yield from zip(block, found, strict=True)
    finally:
        progress.finish()
    report.finish()


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
    if generator is None or generator.predicts != "words":
        return DetectionModel(detector, None, fingerprints)
    _check_vocabularies(model, detector.network, generator)
    proposer = Proposer(moved(generator, place), special_tokens(detector.tokenizer))
    return DetectionModel(detector, proposer, fingerprints)


def _detector(model: ModelFolder, networks: Mapping[str, Network], device: torch.device) -> Detector:
    discriminators = [network for network in networks.values() if network.predicts == "replaced"]
    if not discriminators:
        energies = any(network.predicts == "energy" for network in networks.values())
        does = "computes energies, not probabilities" if energies else "fills masks"
        raise ConfigError(
            f"{model.folder} has no discriminator: its {' and '.join(networks)} {does}",
            hint="give a run of objective 'rtd', or its export: discern export RUN --out DIR --network discriminator",
        )
    return Detector(model.tokenizer, model.max_length, moved(discriminators[0], device))


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


DEFAULT_THRESHOLD = 0.5
CALIBRATION_FORMAT = 1


@dataclass(frozen=True)
class ChosenThreshold:
    """The probability from which a token is marked.

    Attributes:
        value: the probability.
        origin: 'given' by the user, 'calibrated' and stored beside the model, or the 'default', one half.
        precision: precision that it was calibrated for; None if it was not.
    """

    value: float
    origin: Literal["given", "calibrated", "default"]
    precision: float | None = None

    @property
    def described(self) -> str:
        """Origin in a few words."""
        return f"calibrated for precision {self.precision:g}" if self.precision is not None else self.origin


def chosen_threshold(model: Path, detector: Detector, given: float | None, warn: Callable[[str], None]) -> ChosenThreshold:
    """The given threshold, or else the one stored beside the model if it was calibrated for these weights, or else one half.

    Raises:
        DataError: the calibration file is damaged.
    """
    if given is not None:
        return ChosenThreshold(given, "given")
    path = model / CALIBRATION_NAME
    if not path.is_file():
        return ChosenThreshold(DEFAULT_THRESHOLD, "default")
    hint = "delete it, calibrate again, or set --threshold"
    kept = read_json(path, _Kept, hint=hint, version=CALIBRATION_FORMAT)
    if kept["head_fingerprint"] != head_fingerprint(detector.network):
        warn(f"{path} was calibrated for other weights: using threshold {DEFAULT_THRESHOLD:g}; run --calibrate again")
        return ChosenThreshold(DEFAULT_THRESHOLD, "default")
    return ChosenThreshold(float(kept["threshold"]), "calibrated", float(kept["wanted_precision"]))


class _Kept(Record):
    """Required contents of the calibration file."""

    format: int
    threshold: Annotated[float, Field(ge=0, le=1)]
    wanted_precision: Annotated[float, Field(ge=0, le=1)]
    head_fingerprint: str


def head_fingerprint(network: Network) -> str:
    """SHA-256 of the weights of a network's head: they are few and change with every step of training."""
    return fingerprint_weights(*(part for part in (network.head, network.bilinear) if part is not None))


Show = Callable[[InputText, Detection, ChosenThreshold], None]


@dataclass(frozen=True)
class Detected:
    """Counts of a `discern detect`.

    Attributes:
        texts, tokens: number of texts and number of tokens.
        marked: number of tokens whose probability reaches the threshold.
        threshold: threshold that was used.
    """

    texts: int
    tokens: int
    marked: int
    threshold: ChosenThreshold


def detect_texts(
    model: Path,
    texts: Iterable[InputText],
    show: Show,
    progress: Progress,
    warn: Callable[[str], None],
    *,
    threshold: float | None = None,
    out: Path | None = None,
    page: Path | None = None,
    source: Path | None = None,
    device: str = "auto",
) -> Detected:
    """Detect replaced tokens in texts, in order, in float32. Memory is bounded, unless a page is written.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA discriminator.
        texts: read once, in order.
        show: called with the result of each text.
        warn: called with messages about texts that are read in several windows, damaged checkpoints that were skipped, and an
            outdated threshold.
        threshold: probability from which a token is marked; None: the calibrated one, or one half.
        out: JSON lines file to write.
        page: HTML file to write.
        source: file that the texts come from, which must not be overwritten.

    Raises:
        ConfigError: the model has no discriminator, or `out` or `page` is a folder or the input.
        DataError: the folder has no model or no tokenizer, or the texts cannot be read; nothing is left of `out` and `page`.
        CheckpointError: the weights are missing or damaged.
    """
    for option, path, example in (("--out", out, "found.jsonl"), ("--html", page, "page.html")):
        if path is not None:
            check_output(option, path, example, model, source)
    if out is not None and page is not None and out.resolve() == page.resolve():
        raise ConfigError(f"--out and --html both name {out}", hint="give the page another name")
    with_generator = load_detection_model(model, warn, device) if page is not None else None
    detector = load_detector(model, warn, device) if with_generator is None else with_generator.detector
    chosen = chosen_threshold(model, detector, threshold, warn)
    on_page: list[tuple[InputText, Detection]] = []
    num_texts = tokens = marked = 0
    with ExitStack() as stack:
        file = stack.enter_context(whole_file(out)) if out is not None else None
        for text, found in detect_each(detector, texts, progress, warn):
            num_texts, tokens = num_texts + 1, tokens + len(found.tokens)
            marked += sum(probability >= chosen.value for probability in found.replaced_probability)
            show(text, found, chosen)
            if file is not None:
                line = {"line": text.number, "text": found.text, **detection_values(found, chosen.value)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            # The first text always has room.
            if with_generator is not None and (num_texts == 1 or (tokens <= MAX_TOKENS and num_texts <= MAX_TEXTS)):
                on_page.append((text, found))
    if page is not None and with_generator is not None:
        write_page(page, model.resolve().name, with_generator, on_page, num_texts - len(on_page), chosen, progress, warn)
    return Detected(num_texts, tokens, marked, chosen)


def detection_values(detection: Detection, threshold: float) -> dict[str, Any]:
    """The result for a text, as in `--json`."""
    return {
        "tokens": detection.tokens,
        "offsets": detection.offsets,
        "replaced_probability": detection.replaced_probability,
        "marked": [probability >= threshold for probability in detection.replaced_probability],
        "threshold": threshold,
    }


NUM_PROPOSALS = 5
# More would make a browser slow, and a generator may need one forward pass per token.
MAX_TOKENS, MAX_TEXTS = 20_000, 5_000


def write_page(
    out: Path,
    name: str,
    model: DetectionModel,
    texts: Sequence[tuple[InputText, Detection]],
    left_out: int,
    threshold: ChosenThreshold,
    progress: Progress,
    warn: Callable[[str], None],
) -> None:
    """Write the page, completely or not at all.

    Args:
        name: name of the model on the page.
        texts: texts that the page shows, with their results.
        left_out: number of further texts.
        warn: called if some texts have no room.

    Raises:
        DataError: the file cannot be written.
    """
    proposals = _proposals(model, [detection for _, detection in texts], progress)
    checked = [
        CheckedText(f"{text.number}", ShadedText(found.text, found.offsets, found.replaced_probability), proposed)
        for (text, found), proposed in zip(texts, proposals, strict=True)
    ]
    notes = []
    if left_out:
        warn(f"{out} shows the first {len(texts):,} texts; {left_out:,} more do not fit on a page")
        notes.append(f"This page shows the first {len(texts):,} texts; {left_out:,} more do not fit on it.")
    tokens = [probability for _, found in texts for probability in found.replaced_probability]
    facts = [
        ("Model", name),
        ("Texts", f"{len(texts):,}"),
        ("Tokens", f"{len(tokens):,}"),
        ("Marked", f"{sum(probability >= threshold.value for probability in tokens):,}"),
        ("Threshold", f"{threshold.value:.3g} ({threshold.described})"),
        ("Generator", "predicts every token" if model.proposer else "not part of the model"),
    ]
    page = DetectionPage(f"Which tokens look replaced: {name}", facts, checked, threshold.value, [*notes, _NOTE])
    with whole_file(out) as file:
        file.write(render_detections(page))


_NOTE = (
    "The probability is the discriminator's estimate that a token is not the original one. It shows how unusual the token is in "
    "this context for this model; correct names and rare words may look replaced. The generator predicts each token from all "
    "other tokens of the text; its likeliest tokens come first."
)


def _proposals(
    model: DetectionModel, found: Sequence[Detection], progress: Progress
) -> Sequence[Sequence[PlaceProposals] | None]:
    """Proposals for each token of each text; None for each text without a generator."""
    if model.proposer is None:
        return [None] * len(found)
    tokenizer = model.detector.tokenizer
    encodings = encode_texts(tokenizer, [each.text for each in found])
    ids = [encoding.ids for encoding in encodings]
    progress.start("asking the generator", sum(map(len, ids)), "tokens")
    try:
        proposed = propose(model.proposer, ids, model.detector.window_size, NUM_PROPOSALS, progress.advance)
    finally:
        progress.finish()
    texts = TokenTexts(tokenizer)
    return [
        [PlaceProposals(list(zip(map(texts.shown, each.ids), each.probabilities, strict=True)), each.own) for each in text]
        for text in proposed
    ]
