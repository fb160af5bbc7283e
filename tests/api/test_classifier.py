"""`discern.TextClassifier`: the interface of scikit-learn over the fine-tuning of the commands."""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score

import discern
from discern.api.classifier import rows_of
from tests.small.run import make_run

TEXTS = [f"{word} {number}" for number in range(24) for word in ("the chef cooked", "purple elephants", "hello")]
LABELS = ["good", "bad", "so-so"] * 24
FAST: dict[str, Any] = {
    "train.max_steps": 40,
    "optimizer.learning_rate": 3e-3,
    "finetune.dropout": 0.0,
    "train.sequences_per_step": 12,
    "task.sequence_length": 16,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("estimator") / "run"
    make_run(folder)
    return folder


@pytest.fixture(scope="module")
def fitted(model: Path) -> discern.TextClassifier:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        classifier = discern.TextClassifier(model, settings=FAST, device="cpu").fit(TEXTS, LABELS)
    assert "seed 0: 40 steps" in stderr.getvalue()
    assert "more examples with eval_set=FILE, or hold out more with settings={" in stderr.getvalue()
    return classifier


def test_it_learns_and_says_classes(fitted: discern.TextClassifier) -> None:
    assert fitted.classes_.tolist() == ["bad", "good", "so-so"]
    assert fitted.score(TEXTS, LABELS) > 0.9
    probabilities = fitted.predict_proba(TEXTS[:5])
    assert probabilities.shape == (5, 3)
    np.testing.assert_allclose(fitted.predict_proba(TEXTS).sum(1), 1, rtol=1e-15)
    assert fitted.predict(TEXTS[:5]).tolist() == [fitted.classes_[place] for place in probabilities.argmax(1)]
    assert fitted.predict([]).shape == (0,)
    assert fitted.predict_proba([]).shape == (0, 3)
    assert fitted.results_["metric"] == "accuracy"
    assert fitted.model_.predict(TEXTS[:1])[0]["label"] == fitted.predict(TEXTS[:1])[0]


def test_arrays_and_data_frames_are_texts_too(fitted: discern.TextClassifier) -> None:
    pandas = pytest.importorskip("pandas")
    expected = fitted.predict(TEXTS[:6]).tolist()
    frame = pandas.DataFrame({"text": TEXTS[:6]}, index=range(6, 0, -1))
    for given in (np.array(TEXTS[:6]), np.array(TEXTS[:6], object), frame["text"], frame, frame.to_numpy()):
        assert fitted.predict(given).tolist() == expected
    pairs = pandas.DataFrame({"a": ["x", "y"], "b": ["z", "w"]})
    assert rows_of(pairs) == rows_of([("x", "z"), ["y", "w"]]) == [("x", "z"), ("y", "w")]


def test_the_conventions_of_scikit_learn(model: Path, fitted: discern.TextClassifier) -> None:
    estimator = discern.TextClassifier(model, settings=FAST, seeds=2)
    assert clone(estimator).get_params() == estimator.get_params()
    assert estimator.set_params(seeds=1) is estimator
    assert estimator.seeds == 1
    assert "TextClassifier" in repr(estimator)
    with pytest.raises(NotFittedError):
        estimator.predict(TEXTS)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(TEXTS[:3]), fitted.predict_proba(TEXTS[:3]))


def test_cross_validation_with_pairs_and_whole_numbers(model: Path) -> None:
    pairs, numbers = [(text, "the meal") for text in TEXTS], np.array([3, 1, 20] * 24)
    estimator = discern.TextClassifier(model, settings=FAST | {"train.max_steps": 5}, device="cpu")
    assert len(cross_val_score(estimator, pairs, numbers, cv=2)) == 2
    said = clone(estimator).fit(pairs, numbers).predict(pairs[:4])
    assert said.dtype == numbers.dtype
    assert set(said.tolist()) <= {1, 3, 20}


def test_the_folder_is_temporary_or_the_users(model: Path, tmp_path: Path) -> None:
    quick = FAST | {"train.max_steps": 2}
    estimator = discern.TextClassifier(model, settings=quick, device="cpu").fit(TEXTS, LABELS)
    folder = estimator.model_.path
    assert folder.is_dir()
    del estimator
    gc.collect()
    assert not folder.exists()
    kept = discern.TextClassifier(model, settings=quick, out=tmp_path / "kept", device="cpu")
    first = kept.fit(TEXTS, LABELS, eval_set=(TEXTS[:6], LABELS[:6]))
    assert first.results_["split"] == "dev"
    assert first.results_["examples"] == 6
    assert [path.name for path in tmp_path.iterdir()] == ["kept"], "the files of examples are gone"
    assert clone(kept).fit(TEXTS, LABELS, eval_set=(TEXTS[:6], LABELS[:6])).results_ == first.results_
    with pytest.raises(discern.DataError, match="different examples"):
        kept.fit(TEXTS[3:], LABELS[3:], eval_set=(TEXTS[:6], LABELS[:6]))
    assert discern.load(tmp_path / "kept").labels() == ("bad", "good", "so-so")


@pytest.mark.parametrize(
    ("texts", "labels", "says"),
    [
        ("one text", ["a"], "found a single text"),
        (["a", "b"], ["x"], "2 rows, but y has shape"),
        (["a", None], ["x", "y"], "row 1 of X is None"),
        ([("a", "b", "c")], ["x"], "has 3 columns"),
        (["a", ("b", "c")], ["x", "y"], "row 1 of X has 2 columns"),
        (["a", "b"], [0.5, 1.0], "not class labels"),
        (["a", "b"], ["x", None], "no label for row 1"),
        (["a", " "], ["x", "y"], "row 1 of X is empty"),
        (["a", "b"], ["x", "x"], "y has one class"),
        (["a", "b"], ["x", "x "], "white space"),
        ([{"text": "a"}], ["x"], r"row 0 of X is \{'text': 'a'\}, expected a text"),
        ([{"a", "b"}], ["x"], "row 0 of X is .*, expected a text"),
        ({"a": "b"}, ["x"], "expected a list of texts, found a dict"),
        (["a", "b"], np.array(["x", 1], object), "y mixes strings with other labels"),
    ],
)
def test_what_cannot_be_learned_from(model: Path, texts: Any, labels: Any, says: str) -> None:
    with pytest.raises(discern.ConfigError, match=says):
        discern.TextClassifier(model).fit(texts, labels)


def test_texts_to_evaluate_on_have_the_same_columns(model: Path) -> None:
    with pytest.raises(discern.ConfigError, match=r"eval_set\[0\] has 2 texts per row, but X has 1"):
        discern.TextClassifier(model).fit(["a", "b"], ["x", "y"], eval_set=([("a", "b")], ["x"]))
    with pytest.raises(discern.ConfigError, match=r"row 1 of eval_set\[0\] is 1, expected a text"):
        discern.TextClassifier(model).fit(["a", "b"], ["x", "y"], eval_set=(["a", 1], ["x", "y"]))


def test_hints_speak_of_python(model: Path) -> None:
    with pytest.raises(discern.DataError, match="too few to hold") as caught:
        discern.TextClassifier(model).fit(["a", "a"], ["x", "y"])
    assert "eval_set=" in str(caught.value.hint)
    with pytest.raises(discern.ConfigError, match="'z', which does not occur in y"):
        discern.TextClassifier(model).fit(["a", "b"], ["x", "y"], eval_set=(["c"], ["z"]))
    with pytest.raises(discern.ConfigError, match=r"eval_set\[0\] has 2 rows, but eval_set\[1\] has shape \(1,\)"):
        discern.TextClassifier(model).fit(["a", "b"], ["x", "y"], eval_set=(["c", "d"], ["x"]))
