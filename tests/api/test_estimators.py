"""`TextClassifier`, `TextRegressor` and `TokenClassifier`: the interface of scikit-learn over the fine-tuning of the commands."""

from __future__ import annotations

import contextlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks

import discern
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
QUICK = FAST | {"train.max_steps": 2}


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
    assert "train: 70 examples, X, y\n" in stderr.getvalue()
    return classifier


def test_a_classifier_learns(fitted: discern.TextClassifier) -> None:
    assert fitted.classes_.tolist() == ["bad", "good", "so-so"]
    assert fitted.score(TEXTS, LABELS) > 0.9
    assert fitted.score(TEXTS[:2], ["good", "dab"]) == 0.5
    probabilities = fitted.predict_proba(TEXTS)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-15)
    assert fitted.predict(TEXTS).tolist() == fitted.classes_[probabilities.argmax(1)].tolist()
    assert fitted.predict_proba([]).shape == (0, 3)
    assert fitted.results_["metric"] == "accuracy"
    assert fitted.model_.predict(TEXTS[:1])[0]["label"] == fitted.predict(TEXTS[:1])[0]
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(TEXTS[:3]), probabilities[:3])


def test_arrays_and_data_frames_are_texts_too(fitted: discern.TextClassifier) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": TEXTS[:6]}, index=range(6, 0, -1))
    for given in (np.array(TEXTS[:6]), np.array(TEXTS[:6], object), frame["text"], frame, frame.to_numpy()):
        assert fitted.predict(given).tolist() == fitted.predict(TEXTS[:6]).tolist()


@pytest.mark.parametrize("kind", [discern.TextClassifier, discern.TextRegressor, discern.TokenClassifier])
def test_the_checks_of_scikit_learn_that_fit_nothing(kind: Any, model: Path) -> None:
    """All others fit numbers; `check_estimator` leaves out estimators of texts."""
    estimator = kind(model, settings=FAST, seeds=2)
    for check in (
        estimator_checks.check_estimator_cloneable,
        estimator_checks.check_estimator_tags_renamed,
        estimator_checks.check_valid_tag_types,
        estimator_checks.check_estimator_repr,
        estimator_checks.check_no_attributes_set_in_init,
        estimator_checks.check_do_not_raise_errors_in_init_or_set_params,
        estimator_checks.check_mixin_order,
        estimator_checks.check_estimators_unfitted,
    ):
        check(kind.__name__, estimator)
    assert clone(estimator).get_params() == estimator.get_params()


def test_search_in_a_pipeline_with_pairs_and_whole_numbers(model: Path) -> None:
    pairs, numbers = [(text, "the meal") for text in TEXTS], np.array([3.0, 1.0, 20.0] * 24)
    pipeline = make_pipeline(FunctionTransformer(), discern.TextClassifier(model, device="cpu"))
    search = GridSearchCV(pipeline, {"textclassifier__settings": [QUICK, QUICK | {"train.max_steps": 3}]}, cv=2)
    predicted = search.fit(pairs, numbers).predict(pairs[:4])
    assert predicted.dtype == numbers.dtype
    assert set(predicted.tolist()) <= {1.0, 3.0, 20.0}
    assert len(search.cv_results_["params"]) == 2


def test_several_labels_per_text(model: Path) -> None:
    labels: Any = [["hot"], {"hot", "sweet"}, ()] * 24
    classifier = discern.TextClassifier(model, settings=FAST, device="cpu").fit(TEXTS, labels)
    assert classifier.predict(TEXTS[:3]) == [["hot"], ["hot", "sweet"], []]
    assert classifier.score(TEXTS[:4], [["hot"], ["sweet", "hot"], [], ["sweet"]]) == 0.75
    assert (classifier.predict_proba(TEXTS[1:2]) > 0.5).all()


def test_a_regressor_learns(model: Path) -> None:
    numbers = np.array([1, 2.5, 3] * 24)
    regressor = discern.TextRegressor(model, settings=FAST | {"train.max_steps": 80}, device="cpu").fit(TEXTS, numbers)
    assert regressor.predict(TEXTS).shape == (72,)
    assert regressor.score(TEXTS, numbers) > 0.9


def test_a_tagger_learns_and_scores(model: Path) -> None:
    words, gold = [text.split() for text in TEXTS], [["O", "B-X", "O", "O"], ["O", "B-X", "O"], ["O", "O"]] * 24
    tagger = discern.TokenClassifier(model, settings=FAST, device="cpu").fit(words, gold)
    assert tagger.predict(TEXTS[:3]) == tagger.predict(words[:3]) == gold[:3]
    assert tagger.score(TEXTS[:2], [["O", "B-X", "O", "O"], ["B-X", "O", "O"]]) == 0.5
    assert len(cross_val_score(clone(tagger).set_params(settings=QUICK), words, gold, cv=2)) == 2


def test_the_users_folder(model: Path, tmp_path: Path) -> None:
    kept = discern.TextClassifier(model, settings=QUICK, out=tmp_path / "kept", device="cpu")
    first = kept.fit(TEXTS, LABELS, eval_set=(TEXTS[:6], LABELS[:6])).results_
    assert (first["split"], first["examples"]) == ("dev", 6)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    again = clone(kept).fit(TEXTS, LABELS, eval_set=(TEXTS[:6], LABELS[:6])).results_
    assert again["scores"] == first["scores"], "complete, so it is not trained again"
    with pytest.raises(discern.DataError, match="holds another fine-tuning"):
        kept.fit(TEXTS[3:], LABELS[3:], eval_set=(TEXTS[:6], LABELS[:6]))
    assert discern.load(tmp_path / "kept").labels() == ("bad", "good", "so-so")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("one text", ["a"]), "found a single text"),
        ((["a", "b"], ["x"]), "2 texts, but 1 label"),
        (([("a", "b", "c")], ["x"]), "item 0 is .*, expected a text, or a pair"),
        ((["a", " "], ["x", "y"]), "row 1 of X, y: 'text' is empty"),
        ((["a", "b"], [0.5, 1.0]), "y contains 0.5"),
        ((["a", "b"], ["x", 1]), "y contains 1, expected only strings"),
        ((["a", "b"], ["x", "x"]), "every example of X, y is 'x'"),
        ((["a", "a"], ["x", "y"]), "too few to hold .*\n.* eval_set="),
        ((["a", "b"], ["x", "y"], (["c"], ["z"])), "row 0 of eval_set: label 'z'"),
    ],
)
def test_what_cannot_be_learned_from(model: Path, arguments: Any, says: str) -> None:
    with pytest.raises(discern.DiscernError, match=says):
        discern.TextClassifier(model).fit(*arguments)


def test_numbers_and_tags_that_do_not_fit(model: Path) -> None:
    with pytest.raises(discern.DataError, match="row 1 of X, y: 'label' is NaN, expected a finite number"):
        discern.TextRegressor(model).fit(["a", "b"], [1.0, np.nan])
    with pytest.raises(discern.DataError, match="row 1 of X, y: 2 words in 'words' but 1 tags"):
        discern.TokenClassifier(model).fit(["a", "b c"], [["O"], ["B-X"]])
