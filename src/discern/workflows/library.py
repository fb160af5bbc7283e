"""A model in Python: text vectors, suspicious tokens, scores, filled masks, and predictions of fine-tuned models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, final, overload

import numpy as np
from jaxtyping import Float
from tokenizers import Tokenizer

from discern.data.tokenizer import load_tokenizer
from discern.data.unknown import UnknownTokens
from discern.errors import ConfigError
from discern.interop.hub import local_model
from discern.progress import Silent
from discern.scoring.base import Score, Scorer
from discern.scoring.detection import Detection, Detector, detect_replaced
from discern.scoring.filling import FilledToken, Filler
from discern.scoring.states import Reader, first_states, mean_states, token_states
from discern.tasks.base import Prediction
from discern.training.parallel import choose_device
from discern.workflows.detect import load_detector
from discern.workflows.encoders import load_encoder
from discern.workflows.fill import filled, load_filler
from discern.workflows.finetuned import FineTuned
from discern.workflows.predict import chosen_task, predictions_of
from discern.workflows.python_input import examples_of
from discern.workflows.runs import is_finetuned
from discern.workflows.score import load_scorer
from discern.workflows.task_models import load_task_model

# Texts whose states, tokens and scores are held at once; each further array is what the caller asked for.
_BLOCK = 1024
T = TypeVar("T")


def load(path: str | Path, *, device: str = "auto") -> Model:
    """A model to use from Python, computing in float32.

    Networks other than the encoder (a generator, an energy, the head of a task) are loaded when they are first
    used; an error is raised if the folder has none.

    Args:
        path: folder of a run, of a fine-tuning, of an export of either, or of a Hugging Face ELECTRA or BERT; or the name of
            such a model on the Hugging Face Hub, which is downloaded once.
        device: 'auto', 'cpu', 'cuda', 'cuda:1', ...

    Raises:
        DataError: the folder holds no such model, or no tokenizer that fits.
        CheckpointError: its weights are missing or damaged.
        ConfigError: the machine has no such device.
    """
    folder = local_model(path, Silent().note)
    place = str(choose_device(device))
    if is_finetuned(folder):
        tuned = load_task_model(folder)
        length = max(task.config.sequence_length for task in tuned.objective.tasks.values())
        model = Model(folder, Reader(tuned.objective.encoder.to(place), tuned.tokenizer, length), place)
        model._task_models[None] = tuned
        return model
    loaded = load_encoder(folder, warn=_warn)
    reader = Reader(loaded.encoder.to(place), load_tokenizer(loaded.tokenizer_path), loaded.max_length)
    return Model(folder, reader, place)


@final
class Model:
    """What `discern.load` gives. Texts are batched inside; results are in the order of the texts, and the same for each
    text whatever stands beside it, up to rounding.

    A text longer than the model was trained on is read in overlapping windows; a `UserWarning` says so.

    Attributes:
        path: the folder that it came from.
        device: that it computes on.
    """

    def __init__(self, path: Path, reader: Reader, device: str) -> None:
        self.path = path
        self.device = device
        self._reader = reader
        self._scorers: dict[str | None, Scorer] = {}
        self._task_models: dict[int | None, FineTuned] = {}

    def __repr__(self) -> str:
        return f"discern.load({str(self.path)!r}, device={self.device!r})"

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the `tokenizers` library: `model.tokenizer.encode(text, add_special_tokens=False)` has tokens and offsets."""
        return self._reader.tokenizer

    @property
    def hidden_size(self) -> int:
        """D, numbers in a vector."""
        return self._reader.encoder.config.hidden_size

    @property
    def max_length(self) -> int:
        """Tokens that the model was trained to read at a time, [CLS] and [SEP] included."""
        return self._reader.max_length

    @overload
    def encode(self, texts: Sequence[str], pooling: Literal["mean", "first"] = "mean") -> Float[np.ndarray, "N D"]: ...
    @overload
    def encode(self, texts: Sequence[str], pooling: Literal["none"]) -> list[Float[np.ndarray, "T D"]]: ...
    def encode(self, texts: Sequence[str], pooling: str = "mean") -> Float[np.ndarray, "N D"] | list[Float[np.ndarray, "T D"]]:
        """Texts as vectors: the states of the last layer, float32.

        Args:
            pooling: 'mean' of the text's tokens, without [CLS] and [SEP], zeros where there is no token; 'first': the state
                of [CLS], for which a long text is cut; 'none': an array a text, with a row for each of its tokens.

        Raises:
            ConfigError: `texts` is a single text, or there is no such pooling.
        """
        if pooling == "none":
            return self._by_blocks(texts, lambda block: token_states(self._reader, block, _warn))
        pools = {"mean": mean_states, "first": first_states}
        if pooling not in pools:
            raise ConfigError(f"unknown pooling {pooling!r}", hint="one of 'mean', 'first', 'none'")
        vectors = self._by_blocks(texts, lambda block: list(pools[pooling](self._reader, block, _warn)))
        return np.array(vectors, np.float32).reshape(len(vectors), self.hidden_size)

    def detect(self, text: str) -> Detection:
        """The probability that each token of a text was replaced.

        Raises:
            ConfigError: the model has no discriminator.
        """
        return self.detect_many([text])[0]

    def detect_many(self, texts: Sequence[str]) -> list[Detection]:
        """As `detect`, for many texts."""

        def detected(block: Sequence[str]) -> list[Detection]:
            encodings = self._detector.tokenizer.encode_batch(list(block), add_special_tokens=False)
            too_long = sum(len(encoding) > self._detector.room for encoding in encodings)
            if too_long:
                _warn(f"{too_long} of {len(block)} texts are longer than {self._detector.room} tokens: judged in windows")
            return detect_replaced(self._detector, block, encodings, Silent().advance)

        return self._by_blocks(texts, detected)

    def score(self, texts: Sequence[str], scorer: str | None = None) -> Float[np.ndarray, "N"]:
        """How likely each text is, in nats; higher is likelier.

        Args:
            scorer: as of `discern score`; None: the first that the networks serve.

        Raises:
            ConfigError: no such scorer, or the model lacks what it needs.
        """
        return np.array([score.total for score in self.score_tokens(texts, scorer)], np.float64)

    def score_tokens(self, texts: Sequence[str], scorer: str | None = None) -> list[Score]:
        """As `score`, with the share of each token."""
        if scorer not in self._scorers:
            self._scorers[scorer] = load_scorer(self.path, scorer, self.device, warn=_warn)
        return self._by_blocks(texts, self._scorers[scorer].score)

    def fill(self, text: str, top: int = 5) -> list[list[FilledToken]]:
        """The likeliest tokens at each "[MASK]" of a text, best first: a list a mask.

        Raises:
            ConfigError: the model has no head over the vocabulary, or the text no mask.
        """
        return filled(self._filler, text, top, _warn)

    def predict(self, texts: Iterable[Any], *, task: str | None = None, seed: int | None = None) -> list[dict[str, Any]]:
        """Predict for each text: a dictionary with the keys of a line of `discern predict`.

        - Classification: `label`, its `probability`, and `probabilities` by label. With several labels at once: `labels`
          and `probabilities`. Regression: `score`.
        - Tagging: `words`, `tags`, `probabilities` (of the tags), and, where tags mark spans, `spans`: each
          `[start, stop, type]` covers the words `start` to `stop - 1`.
        - Questions: `answer` (empty: none), `start` and `end` (characters of the context; None without an answer), its
          `probability` among the answers found, `best_answer`, `nbest`, and, where questions may have no answer,
          `no_answer`, its score.

        Args:
            texts: for classification and regression, texts or pairs of texts, as in training; for tagging, texts
                (split at white space) or lists of words; for question answering, pairs
                (question, context). A list, an array, or a column of a data frame.
            task: task to predict, if the model was fine-tuned on several.
            seed: seed of a fine-tuning whose weights are used; None: the best.

        Raises:
            ConfigError: there is no such task or seed, or an item of `texts` is not what the task reads.
            DataError: the model has not been fine-tuned.
        """
        model = self._task_model(seed)
        chosen = chosen_task(model, task)
        examples = examples_of(chosen, model.record["tasks"][chosen.name], texts)
        unknown = UnknownTokens(model.tokenizer)
        said = predictions_of(model, chosen, iter(examples), "float32", _Warned(), unknown)
        found = [_shown(prediction, chosen.labels.kind) for block in said for prediction in block]
        unknown.report(Silent().note, _warn)
        return found

    def labels(self, task: str | None = None) -> tuple[str, ...]:
        """The classes or tags of a fine-tuned model, in the order of its outputs; empty where there are none."""
        return chosen_task(self._task_model(None), task).labels.names

    def _task_model(self, seed: int | None) -> FineTuned:
        if seed not in self._task_models:
            self._task_models[seed] = load_task_model(self.path, seed)
        model = self._task_models[seed]
        model.objective.to(self.device)
        return model

    @cached_property
    def _detector(self) -> Detector:
        detector = load_detector(self.path, _warn)
        for part in (detector.network.encoder, detector.network.head, detector.network.bilinear):
            if part is not None:
                part.to(self.device)
        return detector

    @cached_property
    def _filler(self) -> Filler:
        return load_filler(self.path, _warn, self.device)

    def _by_blocks(self, texts: Sequence[str], work: Callable[[Sequence[str]], list[T]]) -> list[T]:
        """Some texts at a time, so that no more is held than what is asked for."""
        if isinstance(texts, str):  # a sequence of characters, by its type
            raise ConfigError("expected a list of texts, found a single text", hint="put it into a list: [text]")
        return [each for first in range(0, len(texts), _BLOCK) for each in work(texts[first : first + _BLOCK])]


def _shown(prediction: Prediction, kind: str) -> dict[str, Any]:
    """What Python users see of a prediction.

    Args:
        kind: of the task's labels.
    """
    shown = {name: value for name, value in prediction.items() if name not in ("id", "logits")}
    if kind == "single":
        return {"label": shown["label"], "probability": shown["probabilities"][shown["label"]], **shown}
    if kind == "spans":
        best = shown["nbest"][0] if shown["nbest"] and shown["answer"] else None
        place = {"start": best["start"], "end": best["start"] + len(best["text"])} if best else {"start": None, "end": None}
        return {"answer": shown["answer"], **place, "probability": best["probability"] if best else None, **shown}
    return shown


class _Warned(Silent):
    """A listener that turns messages into Python warnings."""

    def note(self, message: str) -> None:
        _warn(message)


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
