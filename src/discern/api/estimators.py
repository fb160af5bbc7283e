"""Estimators with the interface of scikit-learn: fine-tuned encoders that classify texts, rate texts, or tag words."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from discern.api.verb import in_python, overrides_of, python_errors
from discern.cli.console import progress_display
from discern.cli.progress import Listener
from discern.errors import ConfigError, DataError
from discern.finetuning.run import finetune
from discern.inference.model import load
from discern.inference.prediction import checked_list, examples_from_values
from discern.progress import Progress
from discern.tasks.metrics import span_scores, tag_accuracy
from discern.tasks.rows import written

_TEMPORARY = "discern-fit-"
_FILE_OF_EXAMPLES = re.compile(rf"\S*/{_TEMPORARY}\w+/(train|dev)\.jsonl(?::(\d+))?")


def _about_arguments(message: str) -> str:
    """A message of the command for the caller of `fit`: "/tmp/discern-fit-1234/dev.jsonl:3" is "row 2 of eval_set"."""

    def argument(file: re.Match[str]) -> str:
        name = {"train": "X, y", "dev": "eval_set"}[file[1]]
        return f"row {int(file[2]) - 1} of {name}" if file[2] else name

    return _FILE_OF_EXAMPLES.sub(argument, in_python(message, {"dev": "eval_set", "overwrite": "remove the folder"}))


class _FitProgress(Listener):
    def note(self, message: str) -> None:
        super().note(_about_arguments(message))


class _TextEstimator(BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """Fits and applies a model. Subclasses convert labels to those of files, and predictions to arrays."""

    _label_kind: str | None = None

    def __init__(
        self,
        model: str | Path,
        *,
        settings: Mapping[str, Any] | None = None,
        seeds: int = 1,
        tokenizer: str | Path | None = None,
        untrained: bool = False,
        device: str = "auto",
        out: str | Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.seeds = seeds
        self.tokenizer = tokenizer
        self.untrained = untrained
        self.device = device
        self.out = out
        self.progress = progress

    def fit(self, X: Any, y: Any, eval_set: tuple[Any, Any] | None = None) -> Self:  # noqa: N803
        """Fine-tune on labeled texts.

        Args:
            X: N texts.
            y: N labels.
            eval_set: texts and labels to evaluate on; None: a tenth of the texts is held out.

        Raises:
            ConfigError: X or y has the wrong form, or a setting is wrong.
            DataError: there is nothing to learn, the model cannot be read, or `out` contains something else.
        """
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY) as folder, python_errors(_about_arguments):
            files: dict[str, Any] = {} if self._label_kind is None else {"files.label_kind": self._label_kind}
            for split, (texts, labels) in {"train": (X, y), **({} if eval_set is None else {"dev": eval_set})}.items():
                values = _values(texts)
                if len(values) != len(labels):
                    raise ConfigError(f"{len(values)} texts, but {len(labels)} labels", hint="give one label for each text")
                files[f"files.{split}"] = path = Path(folder, f"{split}.jsonl")
                path.write_text("".join(json.dumps(row) + "\n" for row in self._rows(values, labels)), encoding="utf-8")
            out = Path(self.out or Path(folder, "fine-tuned"))
            self.results_ = finetune(
                str(self.model),
                out=out,
                overrides=(*overrides_of(files), *overrides_of(self.settings)),
                seeds=self.seeds,
                untrained=self.untrained,
                tokenizer=None if self.tokenizer is None else Path(self.tokenizer),
                device=self.device,
                baselines=False,  # scikit-learn has its own
                progress=self.progress or _FitProgress(progress_display()),
            )
            if self.results_["median"] is None:
                raise DataError("every seed failed", hint="try a lower learning rate: --set optimizer.learning_rate=1e-4")
            self.model_ = load(out, device=self.device)
        return self

    def _rows(self, texts: list[Any], y: Any) -> list[dict[str, Any]]:
        """The lines of the file that the model is fitted on, by column."""
        examples = examples_from_values("either", texts)
        return [
            ({"text": row.text} if row.pair is None else {"text_a": row.text, "text_b": row.pair}) | {"label": label}
            for row, label in zip(examples, self._labels(y), strict=True)
        ]

    def _labels(self, y: Any) -> list[Any]:
        """The labels in the types of JSON."""
        raise NotImplementedError

    def _predictions(self, texts: Any) -> list[dict[str, Any]]:
        check_is_fitted(self, "model_")
        return self.model_.predict(_values(texts))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array = True, False
        return tags


def _values(texts: Any) -> list[Any]:
    """The items of a list, an array, a column or a data frame; a row with one column is its value."""
    values = texts.to_numpy() if hasattr(texts, "to_numpy") else texts
    if getattr(values, "ndim", 1) == 2 and values.shape[1] == 1:
        values = values[:, 0]
    return checked_list(values)


@final
class TextClassifier(ClassifierMixin, _TextEstimator):  # type: ignore[misc]
    """Fine-tunes a pre-trained encoder to classify texts, or pairs of texts.

    Works with `clone`, `cross_val_score`, `GridSearchCV` and pipelines of scikit-learn. Texts are a list, an array, a column or a
    data frame with one column (or two, for pairs); labels are a list, an array or a column of strings, integers or Booleans.
    A list of labels for each text trains a classifier that predicts such lists.

    Args:
        model: a run, an export, a Hugging Face folder, or, with `tokenizer`, the name of a preset.
        settings: settings of the fine-tuning, over its recipe: `{"finetune.epochs": 5}`.
        seeds: number of seeds to train; the best on the held-out texts is used.
        tokenizer: tokenizer of a preset, which has none of its own.
        untrained: start from random weights instead of the model's.
        device: 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'.
        out: output folder, for `discern predict`, `report` and `export`; None: only in memory.
        progress: listener, see `discern.progress.Progress`; None: the progress of the command, on stderr.

    Attributes:
        classes_: (C,) the labels, sorted.
        results_: contents of results.json: scores on the held-out texts, settings and others.
        model_: the fine-tuned `discern.Model`.

    Example:
        >>> classifier = discern.TextClassifier("examples/models/modern-cpu").fit(texts, labels)
        >>> classifier.predict(["A fine film."])
    """

    def fit(self, X: Any, y: Any, eval_set: tuple[Any, Any] | None = None) -> Self:  # noqa: N803
        if getattr(y, "ndim", 1) != 1:
            raise ConfigError(
                f"y has {y.ndim} dimensions, expected a label, or a list of labels, for each text",
                hint="choose one column; of an indicator matrix: MultiLabelBinarizer.inverse_transform(y)",
            )
        first = next(iter(y), None)
        several = isinstance(first, Iterable) and not isinstance(first, str)
        self._label_kind = "labels" if several else "label"
        labels = list(chain(*y)) if several else list(y)
        are_strings = bool(labels) and isinstance(labels[0], str)
        for label in labels:
            is_whole = isinstance(label, Integral | np.bool_) or (isinstance(label, float) and label.is_integer())
            if not (isinstance(label, str) if are_strings else is_whole):
                raise ConfigError(
                    f"y contains {label!r}, expected only strings, or only integers and Booleans",
                    hint="remove rows without a label; for numbers use discern.TextRegressor",
                )
        self.classes_ = np.unique(labels)
        self._names = {label: written(label) for label in self.classes_.tolist()}
        if len({*self._names.values(), ""}) <= len(self._names):
            raise ConfigError(f"labels are empty or differ only in white space: {[*self._names][:10]}", hint="rename them")
        return super().fit(X, y, eval_set)

    def _labels(self, y: Any) -> list[Any]:
        # Unknown labels of eval_set are refused when the file is read.
        if self._label_kind == "labels":
            return [[self._names.get(label, str(label)) for label in labels] for labels in y]
        return [self._names.get(label, str(label)) for label in y]

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """(N, C) probabilities of the classes, in the order of `classes_`; if a text has one label, each row sums to 1."""
        rows = [[row["probabilities"][name] for name in self._names.values()] for row in self._predictions(X)]
        probabilities = np.array(rows, np.float64).reshape(len(rows), len(self._names))
        return probabilities if self._label_kind == "labels" else probabilities / probabilities.sum(1, keepdims=True)

    def predict(self, X: Any) -> Any:  # noqa: N803
        """(N,) the most probable class of each text, of the type of the labels in `fit`; or a list of labels for each text."""
        probabilities = self.predict_proba(X)
        if self._label_kind == "labels":
            return [self.classes_[row >= 0.5].tolist() for row in probabilities]
        return self.classes_[probabilities.argmax(1)]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:  # noqa: N803
        """Accuracy; a list of labels is right if it has all labels of the text and no other."""
        if self._label_kind != "labels":
            return float(super().score(X, y, sample_weight))
        same = [set(labels) == set(predicted) for labels, predicted in zip(y, self.predict(X), strict=True)]
        return float(np.average(same, weights=sample_weight))


@final
class TextRegressor(RegressorMixin, _TextEstimator):  # type: ignore[misc]
    """Fine-tunes a pre-trained encoder to predict a number for each text, or pair of texts. Arguments as of `TextClassifier`.

    `score` is R², the coefficient of determination.

    Attributes:
        results_: contents of results.json: scores on the held-out texts, settings and others.
        model_: the fine-tuned `discern.Model`.

    Example:
        >>> regressor = discern.TextRegressor("examples/models/modern-cpu").fit(texts, [1.5, 4.0, 3.2, ...])
        >>> regressor.predict(["A fine film."])
    """

    _label_kind = "number"

    def _labels(self, y: Any) -> list[Any]:
        return np.asarray(y).tolist()  # type: ignore[no-any-return]

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """(N,) a number for each text."""
        return np.array([prediction["score"] for prediction in self._predictions(X)], np.float64)


@final
class TokenClassifier(_TextEstimator):
    """Fine-tunes a pre-trained encoder to tag the words of texts, as named entities or parts of speech.

    Each text is a list of words, or a string that is split at white space, and its label is a list of as many tags. Tags may
    mark spans (B-PER, I-PER, O), in any scheme. Arguments as of `TextClassifier`.

    Attributes:
        results_: contents of results.json: scores on the held-out texts, settings and others.
        model_: the fine-tuned `discern.Model`.

    Example:
        >>> tagger = discern.TokenClassifier("examples/models/modern-cpu").fit([["Ada", "writes"], ...], [["B-PER", "O"], ...])
        >>> tagger.predict(["Grace sleeps"])
    """

    def _rows(self, texts: list[Any], y: Any) -> list[dict[str, Any]]:
        sentences = examples_from_values("tags", texts)
        return [{"words": sentence.words, "tags": list(map(str, tags))} for sentence, tags in zip(sentences, y, strict=True)]

    def predict(self, X: Any) -> list[list[str]]:  # noqa: N803
        """A list of tags for each text."""
        return [prediction["tags"] for prediction in self._predictions(X)]

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """F1 of the spans, or accuracy over all words if the tags of `fit` mark no spans."""
        metric = self.results_["metric"]
        scores = (span_scores if metric == "f1" else tag_accuracy)(y, self.predict(X))
        return float(scores.values[metric])
