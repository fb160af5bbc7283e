"""`discern.load`: vectors, suspicious tokens, scores and filled masks from Python, for every folder that holds a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import discern
from discern.data.tokenizer import load_tokenizer
from discern.inference import windows
from discern.inference.detection import detect
from discern.inference.filling import fill
from discern.inference.prediction import checked_list
from discern.inference.scoring.scorers import load_scorer
from discern.model_files.export import export
from discern.objectives.base import Objective
from discern.progress import Silent
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import make_run

ROOM = 30
TEXTS = ["The chef cooked the meal.", "x", "", "purple elephants ate the naïve guests, and don't stop me now!", " "]
LONG = "The chef cooked the meal and the naïve guests ate purple elephants. " * 4
FOLDERS = ("run", "whole", "discriminator")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Objective]:
    """A run, beside it `whole` with all networks and `discriminator` alone; and the run's networks."""
    folder = tmp_path_factory.mktemp("library")
    objective = make_run(folder / "run", overrides=[f"data.sequence_length={ROOM + 2}"])
    export(folder / "run", out=folder / "whole", all_networks=True, progress=Silent(), warn=pytest.fail)
    export(folder / "run", out=folder / "discriminator", progress=Silent(), warn=pytest.fail)
    return folder, objective


@pytest.fixture(params=FOLDERS)
def model(request: pytest.FixtureRequest, made: tuple[Path, Objective]) -> discern.Model:
    return discern.load(made[0] / request.param, device="cpu")


@pytest.fixture
def run(made: tuple[Path, Objective]) -> discern.Model:
    return discern.load(str(made[0] / "run"), device="cpu")


def states_of(made: tuple[Path, Objective], ids: list[int]) -> np.ndarray:
    """By one plain call of the encoder, special tokens included."""
    tokenizer = load_tokenizer(made[0] / "run" / "tokenizer.json")
    framed = [tokenizer.token_to_id("[CLS]"), *ids, tokenizer.token_to_id("[SEP]")]
    with torch.no_grad():
        states: np.ndarray = made[1].networks()["discriminator"].encoder(torch.tensor([framed]))[0].numpy()
    return states


def ids_of(model: discern.Model, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False).ids)


def test_vectors_are_the_states_that_transformers_gives(made: tuple[Path, Objective], model: discern.Model) -> None:
    from transformers import AutoModel, AutoTokenizer

    theirs = AutoModel.from_pretrained(made[0] / "whole").eval()
    inputs = AutoTokenizer.from_pretrained(made[0] / "whole")(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        states = theirs(**inputs).last_hidden_state[0].numpy()
    (tokens,) = model.encode(TEXTS[:1], pooling="none")
    np.testing.assert_allclose(tokens, states[1:-1], atol=1e-5)
    np.testing.assert_allclose(model.encode(TEXTS[:1])[0], states[1:-1].mean(0), atol=1e-5)
    np.testing.assert_allclose(model.encode(TEXTS[:1], pooling="first")[0], states[0], atol=1e-5)


def test_shapes_and_types(model: discern.Model) -> None:
    assert model.encode(TEXTS).shape == (5, model.hidden_size)
    assert model.encode(TEXTS).dtype == np.float32
    assert [len(states) for states in model.encode(TEXTS, pooling="none")] == [len(ids_of(model, text)) for text in TEXTS]
    assert not model.encode([""]).any(), "no token, no mean"
    assert model.encode([""], pooling="first").any()


def test_an_empty_list_gives_empty_results(run: discern.Model) -> None:
    assert run.encode([]).shape == (0, run.hidden_size)
    assert run.encode([], pooling="none") == run.detect([]) == run.score_tokens([]) == []


def test_order_and_company_change_nothing(run: discern.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    together, scores = run.encode(TEXTS), run.score(TEXTS)
    np.testing.assert_allclose(together, [run.encode(text) for text in TEXTS], atol=1e-6)
    np.testing.assert_allclose(run.encode(TEXTS[::-1]), together[::-1], atol=1e-6)
    np.testing.assert_allclose(run.score(TEXTS[::-1]), scores[::-1], atol=1e-5)
    assert [found.text for found in run.detect(TEXTS[::-1])] == TEXTS[::-1]
    monkeypatch.setattr(windows, "_TEXTS", 2)
    np.testing.assert_allclose(run.encode(TEXTS), together, atol=1e-6)


def test_a_long_text_is_read_in_windows_and_says_so(made: tuple[Path, Objective], run: discern.Model) -> None:
    said = rf"text 1: \d+ tokens, .* trained on {ROOM} at a time: read in overlapping"
    with pytest.warns(UserWarning, match=said):
        long, short = run.encode([LONG, "x"], pooling="none")
    ids = ids_of(run, LONG)
    assert (len(long), len(short)) == (len(ids), len(ids_of(run, "x")))
    first = states_of(made, ids[:ROOM])
    np.testing.assert_allclose(long[20], first[21], atol=1e-5)
    with pytest.warns(UserWarning, match="the rest is not read"):
        np.testing.assert_allclose(run.encode(LONG, pooling="first"), first[0], atol=1e-5)
    for ask in (run.detect, run.score):
        with pytest.warns(UserWarning, match=said):
            ask([LONG])


def test_detection_scores_and_fillings_are_those_of_the_commands(made: tuple[Path, Objective], run: discern.Model) -> None:
    folder = made[0] / "run"
    assert [run.detect(TEXTS[0])] == detect(folder, TEXTS[:1], Silent(), pytest.fail)
    assert run.fill("The [MASK] ate.", top=3) == fill(folder, "The [MASK] ate.", 3, pytest.fail)
    for name in (None, "rtd", "pll"):
        scorer = load_scorer(folder, name, "cpu", warn=pytest.fail)
        assert run.score_tokens(TEXTS, name) == scorer.score(TEXTS)
        assert run.score(TEXTS, name).tolist() == [score.total for score in scorer.score(TEXTS)]


def test_what_the_folder_lacks_is_said_when_it_is_asked_for(made: tuple[Path, Objective], tmp_path: Path) -> None:
    model = discern.load(made[0] / "discriminator")
    assert model.encode(["x"]).shape[0] == 1
    with pytest.raises(discern.ConfigError, match="no head over the vocabulary"):
        model.fill("[MASK]")
    make_run(tmp_path / "mlm", overrides=["objective.name=mlm"])
    with pytest.raises(discern.ConfigError, match="has no discriminator"):
        discern.load(tmp_path / "mlm").detect("x")


@pytest.mark.parametrize(
    ("texts", "said", "hint"),
    [
        ({"text": ["hello"]}, "found a dict", "data['text']"),
        (SimpleNamespace(columns=["text"]), "found a SimpleNamespace", "data['text']"),  # like a data frame
        ("hello", "found a single text", "[text]"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(texts: Any, said: str, hint: str) -> None:
    with pytest.raises(discern.ConfigError, match=said) as caught:
        checked_list(texts)
    assert hint in str(caught.value.hint)


def test_one_text_has_one_vector_and_one_detection(run: discern.Model) -> None:
    assert run.encode("hello").shape == (run.hidden_size,)
    np.testing.assert_array_equal(run.encode("hello", size=8), run.encode(["hello"], size=8)[0])
    assert run.detect("hello") == run.detect(["hello"])[0]


def test_an_unknown_pooling_and_scorer(run: discern.Model) -> None:
    with pytest.raises(discern.ConfigError, match="unknown pooling 'max'"):
        run.encode(["x"], pooling="max")  # type: ignore[call-overload]
    with pytest.raises(discern.ConfigError, match="item 1 is nan, expected a text"):
        run.score(np.array(["x", np.nan], dtype=object))
    with pytest.raises(discern.ConfigError, match="elctric"):
        run.score(["x"], "elctric")


def test_a_fine_tuned_model_detects_nothing(tmp_path: Path) -> None:
    make_finetuned(tmp_path / "stars", own=SINGLE)
    with pytest.raises(discern.DataError, match="is a fine-tuned model; it outputs task predictions") as caught:
        discern.load(tmp_path / "stars").detect("x")
    assert "discern predict" in str(caught.value.hint)
