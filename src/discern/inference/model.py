"""A model in Python: text vectors, suspicious tokens, scores, filled masks, and predictions of fine-tuned models."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, final, overload

import numpy as np
from jaxtyping import Float
from tokenizers import Tokenizer

from discern.data.tokenizer import fingerprint as tokenizer_fingerprint, load_tokenizer
from discern.errors import ConfigError
from discern.inference.detection import Detection, Detector, detect_each, load_detector
from discern.inference.embedding import Reader, VectorSettings, chosen_settings, text_vectors
from discern.inference.filling import FilledToken, Filler, fill_masks, load_filler
from discern.inference.prediction import checked_list, examples_of, predictions_of, summarized
from discern.inference.scoring.scorers import Score, TextScorer, load_scorer
from discern.inference.texts import InputText, numbered
from discern.model_files.finetuned import FinetunedFolder
from discern.model_files.folder import ModelFolder, TaskModel, fingerprint_weights, open_model
from discern.model_files.hub import local_model
from discern.model_files.serving import read_pooling
from discern.progress import Silent
from discern.tasks.contrastive import ContrastiveConfig
from discern.training.distributed import choose_device

T = TypeVar("T")


def load(path: str | Path, *, device: str = "auto") -> Model:
    """Load a model for use from Python, in float32.

    Networks other than the encoder (a generator, an energy model, the head of a task) are loaded when they are first used; an
    error is raised if the folder does not have them.

    Args:
        path: folder of a run, a fine-tuned model, an export of either, or a Hugging Face model; or its name on the Hugging
            Face Hub, which is downloaded once.
        device: 'auto', 'cpu', 'cuda', 'cuda:1', ...

    Raises:
        DataError: the folder has no such model, or no matching tokenizer.
        CheckpointError: the weights are missing or damaged.
        ConfigError: there is no such device.
    """
    place = str(choose_device(device))
    return model_of(open_model(local_model(path, Silent().note), warn=_warn), place)


def model_of(opened: ModelFolder, place: str) -> Model:
    """The model of a folder that is open, on a device; raises the errors of `load`."""
    if isinstance(opened, FinetunedFolder):
        tuned = opened.task_model()
        # The settings of a model that was fine-tuned for text embeddings; the usual ones for other models.
        configs = (task.config for task in tuned.objective.tasks.values() if isinstance(task.config, ContrastiveConfig))
        trained = (VectorSettings(config.pooling, normalize=True, trained=True) for config in configs)
        reader = Reader(tuned.tokenizer, opened.max_length, tuned.objective.encoder.to(place))
        return Model(opened, reader, place, next(trained, VectorSettings()))
    loaded = opened.encoder
    found = read_pooling(opened.folder, loaded.encoder.architecture.frame)
    stated = None if found is None else found.max_length
    max_length = min(loaded.max_length, stated or loaded.max_length)
    reader = Reader(load_tokenizer(loaded.tokenizer_path), max_length, loaded.encoder.to(place))
    vectors = VectorSettings() if found is None else VectorSettings(found.pooling, found.normalize, trained=True)
    return Model(opened, reader, place, vectors)


@final
class Model:
    """A model loaded by `discern.load`.

    Texts are batched internally. Results are in the order of the texts, and the result for a text does not depend on the other
    texts, up to rounding. A text longer than the model was trained on is read in overlapping windows, with a `UserWarning`.

    Attributes:
        path: folder of the model.
        device: device that it computes on.
        vectors: what `encode` returns by default.
        reader: the encoder with its tokenizer.
    """

    def __init__(self, opened: ModelFolder, reader: Reader, device: str, vectors: VectorSettings) -> None:
        self.path = opened.folder
        self._opened = opened
        self.device = device
        self.vectors = vectors
        self.reader = reader
        self._scorers: dict[str | None, TextScorer] = {}

    def __repr__(self) -> str:
        return f"discern.load({str(self.path)!r}, device={self.device!r})"

    @property
    def tokenizer(self) -> Tokenizer:
        """A tokenizer of the library `tokenizers`; `encode(text, add_special_tokens=False)` returns tokens and offsets."""
        return self.reader.tokenizer

    @property
    def hidden_size(self) -> int:
        """D, the size of a vector."""
        return self.reader.hidden_size

    @property
    def max_length(self) -> int:
        """Number of tokens that the model was trained to read at a time, including [CLS] and [SEP]."""
        return self.reader.max_length

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the encoder's weights and of its tokenizer: vectors of models with the same one can be compared."""
        weights = fingerprint_weights(self.reader.encoder)
        return hashlib.sha256(f"{weights} {tokenizer_fingerprint(self.tokenizer)}".encode()).hexdigest()

    def encode(
        self, texts: str | Iterable[str], pooling: str = "auto", *, normalize: bool | None = None, size: int | None = None
    ) -> Any:
        """Turn texts into vectors: hidden states of the last layer, in float32; the values that `discern embed` writes.

        Args:
            texts: for a list, the result is an array (N, S) of float32; for one text, a single vector (S,).
            pooling: 'mean': the mean over the tokens without [CLS] and [SEP], zeros for a text without tokens; 'mean-all':
                the mean over all tokens; 'cls' or 'first': the state of [CLS]; 'none': a list of one array (T, D) per text,
                with a row for each token. 'auto': as the model was trained, 'mean' if it was not trained for text embeddings.
                With 'mean-all' and 'cls', long texts are truncated.
            normalize: scale each vector to length 1; None: as the model was trained; not, if it was not trained for text
                embeddings.
            size: number of first components to keep, before vectors are normalized; None: all.

        Raises:
            ConfigError: there is no such pooling, or vectors have fewer components.
        """
        listed = _numbered([texts] if isinstance(texts, str) else texts)
        settings = chosen_settings(self.vectors, pooling, normalize, size, self.hidden_size)
        vectors = _results(text_vectors(self.reader, listed, settings, Silent(), _warn))
        if settings.pooling == "none":
            return vectors
        shaped = np.array(vectors, np.float32).reshape(len(vectors), size or self.hidden_size)
        return shaped[0] if isinstance(texts, str) else shaped

    @overload
    def detect(self, texts: str) -> Detection: ...  # type: ignore[overload-overlap]
    @overload
    def detect(self, texts: Iterable[str]) -> list[Detection]: ...
    def detect(self, texts: str | Iterable[str]) -> Detection | list[Detection]:
        """Predict, for each token of one text or of each text of a list, the probability that it was replaced.

        Raises:
            ConfigError: the model has no discriminator.
        """
        listed = _numbered([texts] if isinstance(texts, str) else texts)
        found = [detection for _, detection in detect_each(self._detector, listed, Silent(), _warn)]
        return found[0] if isinstance(texts, str) else found

    def score(self, texts: Iterable[str], scorer: str | None = None) -> Float[np.ndarray, "N"]:
        """Score each text by how likely it is, in nats; higher is likelier.

        Args:
            scorer: as in `discern score`; None: the default scorer of the model.

        Raises:
            ConfigError: there is no such scorer, or the model lacks a network that it needs.
        """
        return np.array([score.total for score in self.score_tokens(texts, scorer)], np.float64)

    def score_tokens(self, texts: Iterable[str], scorer: str | None = None) -> list[Score]:
        """Like `score`, with the score of each token."""
        if scorer not in self._scorers:
            self._scorers[scorer] = load_scorer(self._opened, scorer, self.device, warn=_warn)
        return _results(self._scorers[scorer].score_blocks(_numbered(texts), Silent(), _warn))

    def fill(self, text: str, top: int = 5) -> list[list[FilledToken]]:
        """Predict the most likely tokens at each "[MASK]" in a text, best first: one list per mask.

        Raises:
            ConfigError: the model has no head over the vocabulary, or the text has no mask.
        """
        if not isinstance(text, str):
            raise ConfigError(f"expected a text, found {text!r:.40}", hint='fill("The [MASK] sat on the mat.")')
        return fill_masks(self._filler, text, top, _warn)

    def predict(self, texts: Iterable[Any], *, task: str | None = None, seed: int | None = None) -> list[dict[str, Any]]:
        """Predict labels, tags or answers: for each text, a dictionary with the keys of a line of `discern predict`, without
        `id`, and with the `probability` of what is predicted.

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
            seed: seed whose weights are used; None: the best seed.

        Raises:
            ConfigError: there is no such task or seed, or an item of `texts` is not what the task reads.
            DataError: the model has not been fine-tuned.
        """
        model = self.task_model(seed)
        chosen = model.task(task)
        examples = examples_of(chosen, model.record["tasks"][chosen.name], texts)
        rows = ((example, dict[str, Any]()) for example in examples)
        return [
            summarized({key: value for key, value in prediction.items() if key not in ("id", "logits")}, chosen.labels.kind)
            for _, prediction in predictions_of(model, chosen, rows, "float32", Silent(), _warn)
        ]

    def labels(self, task: str | None = None) -> tuple[str, ...]:
        """The classes or tags of a fine-tuned model, in the order of its outputs; empty if the task has none."""
        return self.task_model().task(task).labels.names

    def task_model(self, seed: int | None = None) -> TaskModel:
        """The fine-tuned model of a seed, on the device; None: the best seed."""
        tuned = self._opened.task_model(seed)
        tuned.objective.to(self.device)
        return tuned

    @cached_property
    def _detector(self) -> Detector:
        return load_detector(self._opened, _warn, self.device)

    @cached_property
    def _filler(self) -> Filler:
        return load_filler(self._opened, _warn, self.device)


def _numbered(texts: Iterable[str]) -> Iterator[InputText]:
    """The texts of a list; a ConfigError for what is no list, and for items that are no texts, such as the gaps of a column."""
    found = checked_list(texts)
    for number, text in enumerate(found):
        if not isinstance(text, str):
            raise ConfigError(f"item {number} is {text!r:.60}, expected a text", hint="every item must be a text")
    return numbered(found)


def _results(blocks: Iterable[list[tuple[InputText, T]]]) -> list[T]:
    return [result for _, result in chain.from_iterable(blocks)]


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
