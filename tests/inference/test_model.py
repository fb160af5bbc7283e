"""`discern.load`: vectors, suspicious tokens, scores and filled masks from Python, for every folder that holds a model."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import discern
from discern.data.tokenizer import load_tokenizer
from discern.inference import model as library
from discern.inference.detection import detect
from discern.inference.fill import fill
from discern.inference.predict import list_of_texts, refuse_other_than_list
from discern.inference.scoring import load_scorer
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
    assert model.max_length == ROOM + 2
    assert "device='cpu'" in repr(model)


def test_an_empty_list_gives_empty_results(run: discern.Model) -> None:
    assert run.encode([]).shape == run.encode([], pooling="first").shape == (0, run.hidden_size)
    assert run.encode([], pooling="none") == run.detect_many([]) == run.score_tokens([]) == []
    assert run.score([]).shape == (0,)


def test_order_and_company_change_nothing(run: discern.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    together, scores = run.encode(TEXTS), run.score(TEXTS)
    alone = np.concatenate([run.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 37):
        shuffled = [TEXTS[number] for number in order]
        np.testing.assert_allclose(run.encode(shuffled), together[list(order)], atol=1e-6)
        np.testing.assert_allclose(run.score(shuffled), scores[list(order)], atol=1e-5)
        assert [found.text for found in run.detect_many(shuffled)] == shuffled
    monkeypatch.setattr(library, "_BLOCK", 2)
    np.testing.assert_allclose(run.encode(TEXTS), together, atol=1e-6)


def test_a_long_text_is_read_in_windows_and_says_so(made: tuple[Path, Objective], run: discern.Model) -> None:
    ids = ids_of(run, LONG)
    with pytest.warns(UserWarning, match=f"1 of 2 texts are longer than the {ROOM} tokens.*overlapping windows"):
        long, short = run.encode([LONG, "x"], pooling="none")
    assert (len(long), len(short)) == (len(ids), len(ids_of(run, "x")))
    # As in detection: windows begin at 0, 15, ...; token 20 counts in the first, token 25 in the second.
    first, second = states_of(made, ids[:ROOM]), states_of(made, ids[15 : 15 + ROOM])
    np.testing.assert_allclose(long[20], first[21], atol=1e-5)
    np.testing.assert_allclose(long[25], second[11], atol=1e-5)
    with pytest.warns(UserWarning, match="the rest is not read"):
        np.testing.assert_allclose(run.encode([LONG], pooling="first")[0], first[0], atol=1e-5)
    with pytest.warns(UserWarning, match="read in overlapping windows"):
        run.detect(LONG)


def test_detection_scores_and_fillings_are_those_of_the_commands(made: tuple[Path, Objective], run: discern.Model) -> None:
    folder = made[0] / "run"
    assert [run.detect(TEXTS[0])] == detect(folder, TEXTS[:1], Silent(), pytest.fail)
    assert run.fill("The [MASK] ate.", top=3) == fill(folder, "The [MASK] ate.", 3, pytest.fail)
    for name in (None, "rtd", "pll"):
        scorer = load_scorer(folder, name, "cpu", warn=pytest.fail)
        assert run.score_tokens(TEXTS, name) == scorer.score(TEXTS)
        assert run.score(TEXTS, name).tolist() == [score.total for score in scorer.score(TEXTS)]


def test_an_export_of_all_networks_does_what_the_run_does(made: tuple[Path, Objective], run: discern.Model) -> None:
    whole = discern.load(made[0] / "whole", device="cpu")
    np.testing.assert_allclose(whole.encode(TEXTS), run.encode(TEXTS), atol=1e-6)
    np.testing.assert_allclose(whole.score(TEXTS), run.score(TEXTS), atol=1e-5)
    by_run, by_export = (model.fill("[MASK] ate.")[0] for model in (run, whole))
    assert [each.token for each in by_run] == [each.token for each in by_export]
    assert whole.detect(TEXTS[0]).replaced_probability == pytest.approx(run.detect(TEXTS[0]).replaced_probability, abs=1e-6)


def test_what_the_folder_lacks_is_said_when_it_is_asked_for(made: tuple[Path, Objective], tmp_path: Path) -> None:
    model = discern.load(made[0] / "discriminator")
    assert model.encode(["x"]).shape[0] == 1
    with pytest.raises(discern.ConfigError, match="no head over the vocabulary"):
        model.fill("[MASK]")
    make_run(tmp_path / "mlm", overrides=["objective.name=mlm"])
    with pytest.raises(discern.ConfigError, match="has no discriminator"):
        discern.load(tmp_path / "mlm").detect("x")


def test_a_bert_of_transformers_encodes(tmp_path: Path, made: tuple[Path, Objective]) -> None:
    from transformers import BertConfig, BertModel

    tokenizer = load_tokenizer(made[0] / "run" / "tokenizer.json")
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    theirs = BertModel(BertConfig(vocab_size=tokenizer.get_vocab_size(), **sizes), add_pooling_layer=False).eval()
    theirs.save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with torch.no_grad():
        states = theirs(torch.tensor([tokenizer.encode(TEXTS[0]).ids])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(discern.load(tmp_path).encode(TEXTS[:1], pooling="first")[0], states[0], atol=1e-5)


@pytest.mark.parametrize("table", [{"text": ["hello"]}, SimpleNamespace(columns=["text"])], ids=["mapping", "like a data frame"])
def test_a_table_is_not_taken_for_a_list_of_its_columns(table: Any) -> None:
    with pytest.raises(discern.ConfigError, match=f"found a {type(table).__name__}") as caught:
        refuse_other_than_list(table)
    assert "data['text']" in str(caught.value.hint)


def test_a_generator_of_texts(run: discern.Model) -> None:
    assert run.detect_many(text for text in TEXTS) == run.detect_many(TEXTS)
    np.testing.assert_array_equal(run.encode(text for text in TEXTS), run.encode(TEXTS))


def test_a_single_text_is_not_taken_for_a_list_of_its_characters(run: discern.Model) -> None:
    for ask in (run.encode, run.score, run.detect_many, run.score_tokens):
        with pytest.raises(discern.ConfigError, match="found a single text") as caught:
            ask("hello")  # type: ignore[operator]
        assert "[text]" in str(caught.value.hint)


def test_an_unknown_pooling_and_scorer(run: discern.Model) -> None:
    with pytest.raises(discern.ConfigError, match="unknown pooling 'max'"):
        run.encode(["x"], pooling="max")  # type: ignore[call-overload]
    with pytest.raises(discern.ConfigError, match="item 1 is nan, expected a text"):
        list_of_texts(["x", float("nan")])
    with pytest.raises(discern.ConfigError, match="elctric"):
        run.score(["x"], "elctric")


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(discern.DataError, match="nowhere does not exist"):
        discern.load(tmp_path / "nowhere")
    make_finetuned(tmp_path / "stars", own=SINGLE)
    with pytest.raises(discern.DataError, match="is a fine-tuned model; it outputs task predictions") as caught:
        discern.load(tmp_path / "stars").detect("x")
    assert "discern predict" in str(caught.value.hint)
