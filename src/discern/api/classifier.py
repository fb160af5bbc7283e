"""A text classifier with the interface of scikit-learn, trained by fine-tuning."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from discern.api.arguments import python_errors
from discern.api.verbs import overrides_of
from discern.cli.console import progress_display
from discern.cli.progress import Listener
from discern.errors import ConfigError, DataError
from discern.finetuning.run import finetune
from discern.inference.model import load
from discern.progress import Progress
from discern.tasks.readers.table import written
from discern.wording import counted, in_python

_PARAMETERS = {"dev": "eval_set"}
# A row of input: one text or two.
_Row = tuple[str, ...]


class _FitProgress(Listener):
    def note(self, message: str) -> None:
        super().note(in_python(message, _PARAMETERS))


@final
class TextClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """Fine-tunes a pre-trained encoder to classify texts, or pairs of texts.

    Works with `clone`, `cross_val_score`, `GridSearchCV` and pipelines of scikit-learn. Texts are a list, an array, a column or a
    data frame with one column (or two, for pairs); labels are a list, an array or a column of strings, integers or Booleans.

    Args:
        model: a run, an export, a Hugging Face folder, or, with `tokenizer`, the name of a preset.
        settings: settings of the fine-tuning, over its recipe: `{"finetune.epochs": 5}`.
        seeds: number of seeds to train; the best on the held-out texts is used.
        tokenizer: tokenizer of a preset, which has none of its own.
        untrained: start from random weights instead of the model's.
        device: 'auto', 'cpu', 'cuda', 'cuda:1', ...
        out: output folder, for `discern predict`, `report` and `export`; None: a temporary folder, which is removed with the
            estimator.
        progress: listener, see `discern.progress.Progress`; None: the progress of the command, on stderr.

    Attributes:
        classes_: (C,) the labels, sorted.
        results_: contents of results.json: scores on the held-out texts, settings and others.
        model_: the fine-tuned `discern.Model`.

    Example:
        >>> classifier = discern.TextClassifier("examples/models/modern-cpu").fit(texts, labels)
        >>> classifier.predict(["A fine film."])
    """

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

    def fit(self, X: Any, y: Any, eval_set: tuple[Any, Any] | None = None) -> TextClassifier:  # noqa: N803
        """Fine-tune on labeled texts.

        Args:
            X: N texts or pairs of texts.
            y: N labels.
            eval_set: texts and labels to evaluate on; None: a tenth of the texts is held out.

        Raises:
            ConfigError: X or y has the wrong form, or a setting is wrong.
            DataError: there is nothing to learn, the model cannot be read, or `out` contains something else.
        """
        rows, labels = _texts_and_labels(X, y, "X", "y")
        classes = np.unique(labels)
        if len(classes) < 2:
            found = "one class" if len(classes) else "no labels"
            raise ConfigError(f"y has {found}, expected two classes or more", hint="add examples of other classes")
        names = _names_of(classes)
        held = None
        if eval_set is not None:
            held_rows, held_labels = _texts_and_labels(*eval_set, "eval_set[0]", "eval_set[1]")
            if len(held_rows[0]) != len(rows[0]):
                raise ConfigError(
                    f"eval_set[0] has {counted(len(held_rows[0]), 'text')} per row, but X has {len(rows[0])}",
                    hint="give the same columns in both",
                )
            unknown = sorted(map(str, set(held_labels.tolist()) - set(classes.tolist())))
            if unknown:
                raise ConfigError(
                    f"eval_set has the label {unknown[0]!r}, which does not occur in y", hint="add examples of it to X and y"
                )
            held = [(row, names[label]) for row, label in zip(held_rows, held_labels.tolist(), strict=True)]
        train = [(row, names[label]) for row, label in zip(rows, labels.tolist(), strict=True)]
        temporary = tempfile.TemporaryDirectory(prefix="discern-") if self.out is None else None
        out = Path(self.out).absolute() if self.out is not None else Path(temporary.name) / "fine-tuned" if temporary else Path()
        self.results_ = self._finetune(train, held, out)
        if self.results_["median"] is None:
            raise DataError("every seed failed", hint="try a lower learning rate: settings={'optimizer.learning_rate': 1e-4}")
        self.classes_ = classes
        self._names = [names[label] for label in classes.tolist()]
        self._temporary = temporary  # removes the folder of an earlier fit
        self.model_ = load(out, device=self.device)
        return self

    def predict_proba(self, X: Any) -> Float[np.ndarray, "N C"]:  # noqa: N803
        """(N, C) probabilities of the classes, in the order of `classes_`; each row sums to 1."""
        check_is_fitted(self, "model_")
        rows = rows_of(X)
        predictions = self.model_.predict([row if len(row) > 1 else row[0] for row in rows])
        found = [[each["probabilities"][name] for name in self._names] for each in predictions]
        rounded = np.array(found, np.float64).reshape(len(rows), len(self._names))
        probabilities: np.ndarray = rounded / rounded.sum(1, keepdims=True)
        return probabilities

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """(N,) the most probable class of each text, of the type of the labels in `fit`."""
        best = self.predict_proba(X).argmax(1)
        chosen: np.ndarray = self.classes_[best]
        return chosen

    def _finetune(self, train: list[tuple[_Row, str]], held: list[tuple[_Row, str]] | None, out: Path) -> dict[str, Any]:
        with _files(train, held, out) as files, python_errors(**_PARAMETERS):
            return finetune(
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

    def __getstate__(self) -> dict[str, Any]:
        """Everything except the temporary folder, since the network is in memory."""
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_temporary"}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array = True, False
        return tags


def rows_of(texts: Any, name: str = "X") -> list[_Row]:
    """The rows of an array, a list or a data frame, as tuples of one text or two.

    Raises:
        ConfigError: the input is a single text, has more than two columns, or contains values that are not texts.
    """
    if isinstance(texts, str):
        raise ConfigError("expected a list of texts, found a single text", hint="pass a list: [text]")
    values = texts.to_numpy() if hasattr(texts, "to_numpy") else texts
    if isinstance(values, Mapping | Set):
        raise ConfigError(f"expected a list of texts, found a {type(values).__name__}", hint="pass a list: [text]")
    rows = [(value,) if _is_one(value) else tuple(value) for value in values]
    for number, row in enumerate(rows):
        if len(row) not in (1, 2) or len(row) != len(rows[0]):
            raise ConfigError(
                f"row {number} of {name} has {len(row)} columns",
                hint="choose the text column, or two columns for pairs of texts",
            )
        if wrong := [value for value in row if not isinstance(value, str)]:
            raise ConfigError(f"row {number} of {name} is {wrong[0]!r:.40}, expected a text", hint="remove such rows")
    return [tuple(str(value) for value in row) for row in rows]


def _is_one(value: Any) -> bool:
    """Whether a row is a single value. A mapping or a set is: `tuple` would take its keys, or its values in any order."""
    return isinstance(value, str | Mapping | Set) or not hasattr(value, "__len__")


def _texts_and_labels(texts: Any, labels: Any, *names: str) -> tuple[list[_Row], np.ndarray]:
    """The rows of the texts, with a label for each.

    Args:
        names: names of both in messages.

    Raises:
        ConfigError: as for `rows_of`, or there is not one label for each text.
    """
    rows, found = rows_of(texts, names[0]), np.asarray(labels)
    if found.ndim != 1 or len(found) != len(rows):
        raise ConfigError(
            f"{names[0]} has {len(rows)} rows, but {names[1]} has shape {found.shape}", hint="give one label for each text"
        )
    empty = next((number for number, row in enumerate(rows) if not all(text.strip() for text in row)), None)
    if empty is not None:
        raise ConfigError(f"row {empty} of {names[0]} is empty", hint="remove such rows")
    missing = next((number for number, label in enumerate(found.tolist()) if _is_missing(label)), None)
    if missing is not None:
        raise ConfigError(f"{names[1]} has no label for row {missing}", hint="remove such rows")
    if len({isinstance(label, str) for label in found.tolist()}) > 1:
        raise ConfigError(f"{names[1]} mixes strings with other labels", hint="give strings, integers or Booleans as labels")
    return rows, found


def _is_missing(label: Any) -> bool:
    """Whether a label is None, NaN, or the NA of pandas, which cannot be compared."""
    try:
        return label is None or bool(label != label)
    except TypeError:
        return True


def _names_of(classes: np.ndarray) -> dict[Any, str]:
    """The name of each label in files.

    Raises:
        ConfigError: two labels have the same name, or a name is empty.
    """
    values = classes.tolist()
    if any(value is None or (isinstance(value, float) and (math.isnan(value) or not value.is_integer())) for value in values):
        raise ConfigError("y contains numbers that are not class labels", hint="give strings, integers or Booleans as labels")
    names = {value: written(value) or "" for value in values}
    if len(set(names.values())) < len(names) or "" in names.values():
        raise ConfigError(f"labels are empty or differ only in white space: {sorted(names.values())[:10]}", hint="rename them")
    return names


@contextlib.contextmanager
def _files(train: list[tuple[_Row, str]], held: list[tuple[_Row, str]] | None, out: Path) -> Iterator[dict[str, Any]]:
    """Write the examples to files, and yield the settings that name them. The files are removed at the end.

    The files are beside `out`, always with the same names, so that an interrupted fine-tuning is continued.
    """
    folder = out.with_name(f".{out.name}-examples")
    folder.mkdir(parents=True, exist_ok=True)
    written_files: list[Path] = []
    try:
        settings: dict[str, Any] = {"files.text": "text", "files.label": "label", "files.label_kind": "label"}
        if train and len(train[0][0]) > 1:
            settings["files.pair"] = "pair"
        for name, rows in (("train", train), ("dev", held)):
            if rows is not None:
                path = folder.resolve() / f"{name}.jsonl"
                written_files.append(path)
                lines = (dict(zip(("text", "pair"), row, strict=False)) | {"label": label} for row, label in rows)
                path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
                settings[f"files.{name}"] = path
        yield settings
    finally:
        for path in written_files:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
