"""The discriminator of a model folder: probabilities of tokens and words, files and a page, calibration and evaluation."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Encoding
from torch import Tensor

from discern.corruption.masking import MaskingContext, sample_tokens, uniform
from discern.corruption.randomness import Randomness, key_of
from discern.data.batching.segments import ExampleStream, PackedRows
from discern.data.dataset.shards import TokenData
from discern.data.sources.streams import shown_name
from discern.data.tokenizer import TokenTexts
from discern.data.tokenizer.tokens import encode_texts
from discern.errors import ConfigError, DataError, counted
from discern.inference.texts import InputText, Span, numbered, overlapping, read_records, words_of
from discern.inference.windows import (
    TOKENS_PER_BATCH,
    TextModel,
    TextT,
    Window,
    device_of,
    framed_outputs,
    moved,
    predicted_from_others,
    read_blocks,
    read_in_windows,
)
from discern.model_files.folder import ModelFolder, fingerprint_weights, open_model
from discern.model_files.hub import CALIBRATION_NAME
from discern.models.base import Network
from discern.models.heads import gather_positions
from discern.models.two_tower.encoder import TwoTowerEncoder
from discern.objectives.metrics import area_under_curve
from discern.progress import Progress
from discern.report.detection_page import CheckedText, PlaceProposals, render_detections
from discern.storage.checksums import Record, read_json, understood, write_json
from discern.storage.files import check_output, whole_file
from discern.training.distributed import choose_device
from discern.types import SpecialTokens


@dataclass(frozen=True)
class DetectedWord:
    """A word of a text.

    Attributes:
        start, end: position in the text, in characters.
        text: the word as the text writes it.
        probability: the highest probability among its tokens; 0 for a word that the tokenizer drops.
    """

    start: int
    end: int
    text: str
    probability: float


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

    @property
    def words(self) -> list[DetectedWord]:
        """The words of the text, in order; everything but white space is part of a word."""
        spans = words_of(self.text)
        word_at = {place: number for number, (start, end) in enumerate(spans) for place in range(start, end)}
        highest = [0.0] * len(spans)
        for (start, end), probability in zip(self.offsets, self.replaced_probability, strict=True):
            for number in {word_at[place] for place in range(start, end) if place in word_at}:
                highest[number] = max(highest[number], probability)
        return [DetectedWord(start, end, self.text[start:end], value) for (start, end), value in zip(spans, highest, strict=True)]


@dataclass(frozen=True)
class Detector(TextModel):
    """A discriminator.

    Attributes:
        generator: the generator it was trained with; None if the folder has none, or it was not asked for.
    """

    network: Network
    generator: Network | None = None


def load_detector(
    model: Path | ModelFolder, warn: Callable[[str], None], device: str = "auto", *, with_generator: bool = False
) -> Detector:
    """Load the discriminator of a run, an export, or a Hugging Face ELECTRA discriminator, in float32.

    Args:
        warn: called with messages about damaged checkpoints that were skipped.
        with_generator: also load the generator, if the folder has one.

    Raises:
        ConfigError: the model has no discriminator.
        DataError: the folder is neither a run nor a model, or has no tokenizer.
        CheckpointError: the weights are missing or damaged.
    """
    place, opened = choose_device(device), open_model(model, warn=warn)
    networks = opened.networks(beside=with_generator)
    discriminator = next((network for network in networks.values() if network.predicts == "replaced"), None)
    if discriminator is None:
        only = " and the ".join(f"{name} that predicts {network.predicts}" for name, network in networks.items())
        raise ConfigError(
            f"{opened.folder} has no discriminator of replaced tokens; it only has the {only}",
            hint="give a run of objective 'rtd', or its export: discern export RUN --out DIR --network discriminator",
        )
    generator = networks.get("generator") if with_generator else None
    if generator is not None:
        generator = moved(generator, place) if generator.predicts == "words" else None
    return Detector(opened.tokenizer, opened.max_length, moved(discriminator, place), generator)


def detect(model: Path, texts: Sequence[str], progress: Progress, warn: Callable[[str], None]) -> list[Detection]:
    """The probability that each token was replaced, in float32; one result per text, in order.

    Raises the errors of `load_detector`.
    """
    return [detection for _, detection in detect_each(load_detector(model, warn), numbered(texts), progress, warn)]


def detect_each(
    detector: Detector, texts: Iterable[TextT], progress: Progress, warn: Callable[[str], None]
) -> Iterator[tuple[TextT, Detection]]:
    """Each text with its result, in order; memory is bounded. `warn` is called as by `read_blocks`."""
    device = device_of(detector.network.encoder)

    def compute(contents: list[str], encodings: list[Encoding]) -> Iterator[Detection]:
        found = read_in_windows(
            [encoding.ids for encoding in encodings],
            detector.window_size,
            lambda windows: framed_outputs(
                windows, lambda ids, mask: detector.network.token_logits(ids, mask).float().sigmoid(), detector.special, device
            ),
        )
        for text, encoding, probabilities in zip(contents, encodings, found, strict=True):
            yield Detection(text, encoding.tokens, encoding.offsets, probabilities)

    return chain.from_iterable(read_blocks(detector, texts, compute, progress, warn, description="detecting"))


def generator_logits(
    generator: Network,
    special: SpecialTokens,
    input_ids: Int[Tensor, "B L"],
    places: Bool[Tensor, "B L"],
    *context: Tensor | None,
) -> Float[Tensor, "n V"]:
    """Logits over the vocabulary at the places, row by row, on the CPU.

    Args:
        context: the encoder's further arguments, on its device.
    """
    device = device_of(generator.encoder)
    reads_masks = not isinstance(generator.encoder, TwoTowerEncoder)
    masked = input_ids.masked_fill(places, special.mask) if reads_masks else input_ids
    states = gather_positions(generator.encoder(masked.to(device), *context), places.to(device))
    logits: Tensor = generator.head(states)
    return logits.float().cpu()


# The threshold

CALIBRATION_FORMAT = 1


class _Calibration(Record):
    """Required contents of the calibration file."""

    format: int
    threshold: Annotated[float, Field(ge=0, le=1)]
    wanted_precision: Annotated[float, Field(ge=0, le=1)]
    head_fingerprint: str


def chosen_threshold(model: Path, detector: Detector, given: float | None, warn: Callable[[str], None]) -> tuple[float, str]:
    """The probability from which a token is marked, and its origin in a few words.

    The given threshold, or else the one stored beside the model if it was calibrated for these weights, or else one half.

    Raises:
        DataError: the calibration file is damaged.
    """
    path = model / CALIBRATION_NAME
    if given is not None:
        return given, "given"
    if path.is_file():
        hint = "delete it, calibrate again, or set --threshold"
        stored = read_json(path, _Calibration, hint=hint, version=CALIBRATION_FORMAT)
        if stored["head_fingerprint"] == head_fingerprint(detector.network):
            return float(stored["threshold"]), f"calibrated for precision {stored['wanted_precision']:g}"
        warn(f"{path} was calibrated for other weights: using threshold 0.5; run --calibrate again")
    return 0.5, "default"


def head_fingerprint(network: Network) -> str:
    """SHA-256 of the weights of a network's head: they are few and change with every step of training."""
    return fingerprint_weights(*(part for part in (network.head, network.bilinear) if part is not None))


# Files and the page

NUM_PROPOSALS = 5
# More would make a browser slow, and a generator may need one forward pass per token.
MAX_TOKENS, MAX_TEXTS = 20_000, 5_000

_NOTE = (
    "The probability is the discriminator's estimate that a token is not the original one. It shows how unusual the token is in "
    "this context for this model; correct names and rare words may look replaced. The generator predicts each token from all "
    "other tokens of the text; its likeliest tokens come first."
)


def detect_texts(
    model: Path,
    texts: Iterable[InputText],
    show: Callable[[Detection, float], None],
    progress: Progress,
    warn: Callable[[str], None],
    *,
    threshold: float | None = None,
    out: Path | None = None,
    page: Path | None = None,
    source: Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Detect replaced tokens in texts, in order, in float32. Memory is bounded, unless a page is written.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA discriminator.
        texts: read once, in order.
        show: called with the result of each text and the threshold.
        warn: called with messages about texts that are read in several windows, damaged checkpoints that were skipped, and an
            outdated threshold.
        threshold: probability from which a token is marked; None: the calibrated one, or one half.
        out: JSON lines file to write.
        page: HTML file to write.
        source: file that the texts come from, which must not be overwritten.

    Returns:
        Number of `texts`, of `tokens` and of `marked` tokens, the `threshold` and its `threshold_origin`.

    Raises:
        ConfigError: the model has no discriminator, or `out` or `page` is a folder or the input.
        DataError: the folder has no model or no tokenizer, or the texts cannot be read; nothing is left of `out` and `page`.
        CheckpointError: the weights are missing or damaged.
    """
    check_output("--out", out, "found.jsonl", model, source)
    check_output("--html", page, "page.html", model, source)
    detector = load_detector(model, warn, device, with_generator=page is not None)
    value, origin = chosen_threshold(model, detector, threshold, warn)
    on_page: list[tuple[InputText, Detection]] = []
    num_texts = tokens = marked = 0
    with nullcontext() if out is None else whole_file(out) as file:
        for text, found in detect_each(detector, texts, progress, warn):
            values = detection_values(found, value)
            num_texts, tokens, marked = num_texts + 1, tokens + len(found.tokens), marked + sum(values["marked"])
            show(found, value)
            if file is not None:
                file.write(json.dumps({"line": text.number, "text": found.text, **values}, ensure_ascii=False) + "\n")
            # The first text always has room.
            if page is not None and (num_texts == 1 or (tokens <= MAX_TOKENS and num_texts <= MAX_TEXTS)):
                on_page.append((text, found))
    if not num_texts:
        warn("the input has no lines, so there is nothing to check")
    counts = {"texts": num_texts, "tokens": tokens, "marked": marked, "threshold": value, "threshold_origin": origin}
    if page is not None:
        notes, name = [_NOTE], model.resolve().name
        if num_texts > len(on_page):
            left_out = num_texts - len(on_page)
            notes.insert(0, f"the page shows the first {len(on_page):,} texts; {left_out:,} more do not fit on it")
            warn(notes[0])
        facts = [
            ("Model", name),
            *((count.capitalize(), f"{counts[count]:,}") for count in ("texts", "tokens", "marked")),
            ("Threshold", f"{value:.3g} ({origin})"),
            ("Generator", "not part of the model" if detector.generator is None else "predicts every token"),
        ]
        proposals: Sequence[Sequence[PlaceProposals] | None] = [None] * len(on_page)
        if detector.generator is not None:
            ids = [encoding.ids for encoding in encode_texts(detector.tokenizer, [found.text for _, found in on_page])]
            progress.start("predicting with the generator", sum(map(len, ids)), "tokens")
            try:
                proposals = propose(detector, detector.generator, ids, NUM_PROPOSALS, progress.advance)
            finally:
                progress.finish()
        checked = [
            CheckedText(f"{text.number}", found.text, found.offsets, found.replaced_probability, proposed)
            for (text, found), proposed in zip(on_page, proposals, strict=True)
        ]
        contents = render_detections(f"Which tokens look replaced: {name}", facts, checked, value, notes)
        with whole_file(page) as file:
            file.write(contents)
    return counts


def detection_values(detection: Detection, threshold: float) -> dict[str, Any]:
    """The result for a text, as in `--json`."""
    return {
        "tokens": detection.tokens,
        "offsets": detection.offsets,
        "replaced_probability": detection.replaced_probability,
        "marked": [probability >= threshold for probability in detection.replaced_probability],
        "threshold": threshold,
    }


def propose(
    detector: Detector, generator: Network, texts: Sequence[Sequence[int]], count: int, advance: Callable[[int], None]
) -> list[list[PlaceProposals]]:
    """The generator's predictions for each token of each text, given all other tokens, without special tokens.

    Args:
        texts: ids, without special tokens.
        count: number of likeliest tokens to return.
        advance: called with the number of further tokens that are done.
    """
    special, names = detector.special, TokenTexts(detector.tokenizer)
    hidden = torch.tensor([special.pad, special.unk, special.cls, special.sep, special.mask])

    def predict(logits: Float[Tensor, "n V"], ids: Int[Tensor, "n"]) -> Iterator[PlaceProposals]:
        probabilities = logits.softmax(-1).cpu()
        own = probabilities.gather(1, ids.cpu()[:, None]).squeeze(1).tolist()
        # Special tokens are left out, but keep their probability.
        best = probabilities.index_fill(1, hidden, -1.0).topk(min(count, logits.shape[1] - len(hidden)))
        for tokens, values, mine in zip(best.indices.tolist(), best.values.tolist(), own, strict=True):
            yield PlaceProposals(list(zip(map(names.shown, tokens), values, strict=True)), mine)
        advance(len(logits))

    def compute(windows: Sequence[Window]) -> Iterator[tuple[int, Sequence[Any]]]:
        return predicted_from_others(generator, windows, special, predict, lambda _, place: range(place, place + 1))

    return read_in_windows(texts, detector.window_size, compute)


# Precision and recall

Scores: TypeAlias = NDArray[np.floating[Any]]
Truth: TypeAlias = NDArray[np.bool_]


def rates_at(scores: Scores, wrong: Truth, thresholds: Sequence[float] | Scores) -> list[dict[str, Any]]:
    """Precision, recall and F1, their harmonic mean, of each threshold. 0/0 is 0.

    Args:
        scores: any finite numbers; larger ones are more suspicious.
        wrong: whether each item is wrong.
        thresholds: items with `score >= threshold` are marked.
    """
    total = int(wrong.sum())
    marked = len(scores) - np.searchsorted(np.sort(scores), thresholds)
    hits = total - np.searchsorted(np.sort(scores[wrong]), thresholds)
    return [
        {
            "threshold": float(threshold),
            "precision": right / max(some, 1),
            "recall": right / max(total, 1),
            "f1": 2 * right / max(some + total, 1),
            "marked": some,
            "hits": right,
        }
        for threshold, some, right in zip(thresholds, marked.tolist(), hits.tolist(), strict=True)
    ]


def distinct_thresholds(scores: Scores) -> Scores:
    """Thresholds that mark different items, the highest first, midway to the next score, so that rounding moves nothing."""
    levels = np.unique(scores)[::-1]
    return np.asarray((levels + np.append(levels[1:], levels[-1:])) / 2)


# Calibration, on held-out text that the generator corrupts

# The corruption is the same for every model, so that thresholds differ only because networks do.
_SEED = key_of("calibration")
MIN_MARKED = 20
"""Number of marked tokens below which a precision is considered chance."""


@torch.inference_mode()
def detect_corrupted(
    detector: Detector, generator: Network, stream: ExampleStream, *, corruption: float, sequences: int, progress: Progress
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Corrupt rows with samples of the generator, as in training, and let the discriminator predict every token.

    Positions and samples depend on the row alone, not on how rows are batched.

    Args:
        corruption: fraction of the tokens to mask and fill, in 0-1; at least one per row.
        sequences: number of rows, evenly spaced; 0: all.
        progress: advanced by rows.

    Returns:
        (T,) probability that each token was replaced, without special tokens and padding, and (T,) whether it was; a sample
        equal to the original token counts as original.

    Reference: Clark et al. 2020, section 2; samples at temperature 1.
    """
    count = min(sequences, stream.num_rows) if sequences else stream.num_rows
    chosen = np.unique(np.linspace(0, stream.num_rows - 1, count).astype(np.int64))
    size = max(1, TOKENS_PER_BATCH // stream.batch(chosen[:1], chosen[:1]).input_ids.shape[1])
    device = device_of(detector.network.encoder)
    probability, is_replaced = [], []
    for start in range(0, len(chosen), size):
        rows = chosen[start : start + size]
        batch = stream.batch(rows, rows)
        # Corrupt the rows.
        randomness = Randomness(_SEED, 0, batch.example_index)
        places = uniform(batch, MaskingContext(corruption, randomness)).positions
        context = batch.to(device).context
        logits = generator_logits(generator, detector.special, batch.input_ids, places, *context)
        samples = sample_tokens(logits, randomness.uniforms("replacements", places.shape[1])[places])
        corrupted = batch.input_ids.masked_scatter(places, samples)
        # Predict every token.
        judged = detector.network.token_logits(corrupted.to(device), *context).cpu()
        probability.append(judged[batch.maskable].sigmoid().numpy())
        is_replaced.append((corrupted != batch.input_ids)[batch.maskable].numpy())
        progress.advance(len(rows))
    return np.concatenate(probability), np.concatenate(is_replaced)


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
    opened = open_model(model, warn=warn)
    detector = load_detector(opened, warn, device, with_generator=True)
    if detector.generator is None:
        raise ConfigError(
            f"{model} has no generator, which is needed to corrupt the calibration text",
            hint="give the run, or export it again: discern export RUN --out DIR --all-networks",
        )
    tokens = TokenData.open(data)
    if tokens.tokenizer_fingerprint not in opened.tokenizer_fingerprints:
        raise DataError(
            f"{data} was made with a different tokenizer from that of {model}",
            hint=f"prepare it again: discern prepare TEXT --out DATA --tokenizer {model} --heldout 0.5",
        )
    split = tokens.split("heldout")
    if split.num_tokens == 0:
        raise DataError(
            f"{data} has no held-out split",
            hint="prepare it again with a larger --heldout; text that is one document needs --documents line, or more text",
        )
    stream = ExampleStream(PackedRows(split, tokens.special_tokens, detector.max_length, 0, rotate=False), 0, shuffle=False)
    progress.start("calibrating", min(sequences or stream.num_rows, stream.num_rows), "rows")
    try:
        probability, is_replaced = detect_corrupted(
            detector, detector.generator, stream, corruption=corruption, sequences=sequences, progress=progress
        )
    finally:
        progress.finish()
    replaced = int(is_replaced.sum())
    # With fewer marked tokens, a precision is mostly chance.
    scores = probability.astype(np.float64)
    possible = [each for each in rates_at(scores, is_replaced, distinct_thresholds(scores)) if each["marked"] >= MIN_MARKED]
    # The highest recall of that precision; without one, the highest precision, and of several the highest recall.
    reached = next((each for each in reversed(possible) if each["hits"] >= precision * each["marked"] - 1e-9), None)
    best = reached or max(possible, key=lambda each: (each["precision"], each["marked"]), default=None)
    if best is None or not replaced:
        raise DataError(
            f"{data} has too little held-out text: {len(probability):,} tokens, {replaced:,} of them replaced; calibration needs "
            f"{MIN_MARKED} marked tokens",
            hint="prepare the data again with a larger --heldout, or add more text",
        )
    from scipy.stats import binomtest  # takes half a second to import

    values: dict[str, Any] = {
        "reached": reached is not None,
        "wanted_precision": precision,
        **best,
        "precision_interval": list(binomtest(best["hits"], best["marked"]).proportion_ci(method="wilson")),
        "auc": area_under_curve(probability, is_replaced),
        "tokens": len(probability),
        "replaced": replaced,
        "corruption": corruption,
        "data_fingerprint": tokens.fingerprint,
    }
    path, kept = model / CALIBRATION_NAME, None
    if reached:
        try:
            write_json(path, {"format": CALIBRATION_FORMAT, **values, "head_fingerprint": head_fingerprint(detector.network)})
            kept = path
        except OSError as problem:
            warn(f"the threshold could not be stored in {path}: {problem.strerror}; give it by --threshold")
    return {**values, "kept": kept}


# Evaluation, on sentences whose wrong words are marked

THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_EXAMPLE = '{"text": "The chef eight it.", "wrong": [[9, 14]]}'


@dataclass(frozen=True)
class MarkedText(InputText):
    """A text whose wrong words are marked.

    Attributes:
        wrong: position of the wrong words, in characters, and the kind of mistake ("" if the file names none), in order.
    """

    wrong: tuple[tuple[int, int, str], ...] = ()


def read_checked(source: Path, field: str | None = None) -> Iterator[MarkedText]:
    """Sentences with marked wrong words, one per line; empty lines are skipped.

    Plain text has [[double brackets]] around each wrong word. JSON lines have the text, and under "wrong" a list of
    [start, end] in characters, or of {"start": 9, "end": 14, "kind": "homophone"}.

    Args:
        source: as in `read_texts`.
        field: as in `read_texts`.

    Raises:
        DataError: raised while reading, with the line: as in `read_texts`, or its brackets or spans are invalid.
    """
    for line, record in read_records(source, field, "--text-field"):
        if record is not None:
            text = record["text"]
            with understood(line.where, hint=f"like {_EXAMPLE}, in characters from 0; [] if no word is wrong"):
                spans = [
                    (span["start"], span["end"], span.get("kind") or "") if isinstance(span, dict) else (*span, "")[:3]
                    for span in record["wrong"]
                ]
                for start, end, _ in spans:
                    if not 0 <= start < end <= len(text) or not text[start:end].strip():
                        raise ValueError(f"span {start} to {end} has no word of the text of {len(text)} characters")
        elif line.text.strip():
            text, spans = "", []
            for number, part in enumerate(re.split(r"\[\[(.*?)\]\]", line.text)):
                if "[[" in part or (number % 2 and not part.strip()):
                    raise DataError(
                        f"{line.where}: expected one wrong word in each [[pair]] of brackets, found {part!r:.40}",
                        hint="for texts with such brackets of their own, use JSON lines: " + _EXAMPLE,
                    )
                if number % 2:
                    spans.append((len(text), len(text) + len(part), ""))
                text += part
        else:
            continue
        yield MarkedText(line.where, line.number, text, tuple(sorted(spans)))


def evaluate_detection(
    model: Path,
    sentences: Path,
    progress: Progress,
    warn: Callable[[str], None],
    *,
    text_field: str | None = None,
    threshold: float | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Precision, recall and F1 by word, at many thresholds and at the model's own.

    The probability of a word is the highest of its tokens. `auc` is None if every word is wrong.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA discriminator.
        sentences: file as in `read_checked`; `-` is standard input.
        text_field: field of JSON lines, as in `read_checked`.
        threshold: threshold to report besides the usual ones; None: the calibrated one, or one half.

    Raises:
        ConfigError: the model has no discriminator.
        DataError: the folder has no model, or the file has no sentence, no wrong word, or a line that cannot be read.
        CheckpointError: the weights are missing or damaged.
    """
    detector = load_detector(model, warn, device)
    value, origin = chosen_threshold(model, detector, threshold, warn)
    num_sentences, probabilities, wrong, found = 0, list[float](), list[bool](), defaultdict[str, list[bool]](list)
    for text, detection in detect_each(detector, read_checked(sentences, text_field), progress, warn):
        words = detection.words
        spans: list[Span] = [(word.start, word.end) for word in words]
        # A word is wrong if it shares a character with a wrong span.
        touched = [overlapping(spans, (start, end)) for start, end, _ in text.wrong]
        for numbers, (_, _, kind) in zip(touched, text.wrong, strict=True):
            found[kind].append(any(words[number].probability >= value for number in numbers))
        num_sentences += 1
        probabilities += [word.probability for word in words]
        wrong += [any(number in numbers for numbers in touched) for number in range(len(words))]
    if not any(wrong):
        contents = "no sentences" if not num_sentences else f"{counted(num_sentences, 'sentence')} but no wrong words"
        raise DataError(f"{shown_name(sentences)} has {contents}", hint="mark what is wrong: The chef [[eight]] it.")
    scores, truth = np.array(probabilities), np.array(wrong)
    by_kind = found if any(found) else {}
    return {
        "sentences": num_sentences,
        "words": len(wrong),
        "wrong": sum(wrong),
        "auc": None if all(wrong) else area_under_curve(scores.astype(np.float32), truth),
        "threshold": value,
        "threshold_origin": origin,
        "at_threshold": rates_at(scores, truth, [value])[0],
        "best_f1": max(rates_at(scores, truth, distinct_thresholds(scores)), key=lambda each: each["f1"]),
        "thresholds": rates_at(scores, truth, THRESHOLDS),
        # Empty if the file names no kinds.
        "by_kind": {kind: {"wrong": len(hits), "recall": sum(hits) / len(hits)} for kind, hits in sorted(by_kind.items())},
    }
