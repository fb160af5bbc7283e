"""A folder for sentence-transformers gives the vectors of `Model.encode`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import discern
from discern.artifacts.export_folder import check_target
from discern.convert.export import export
from discern.convert.sentence_transformers import _without_frame, write_sentence_transformers
from discern.data.tokenizer import load_tokenizer
from discern.errors import CheckpointError, ConfigError
from discern.interop.sentence_transformers import StoredPooling, read_pooling
from discern.progress import Silent
from discern.storage.checksums import write_recorded
from tests.small.run import make_run

TEXTS = ["a quiet street.", "the old town has a bridge of stone.", "", "x"]


@pytest.fixture(scope="module", params=["bert", "modernbert"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    make_run(folder / "run", overrides=[f"model.encoder={request.param}"])
    export(folder / "run", out=folder / "out", progress=Silent(), warn=pytest.fail)
    return folder / "out"


@pytest.mark.parametrize(
    ("pooling", "ours", "normalize"), [("mean", "mean", False), ("mean", "mean", True), ("cls", "first", False)]
)
def test_the_vectors_of_encode(exported: Path, tmp_path: Path, pooling: str, ours: str, normalize: bool) -> None:
    from sentence_transformers import SentenceTransformer

    expected = discern.load(exported).encode(TEXTS, pooling=ours)
    if normalize:
        expected = expected / np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-12)
    assert np.abs(expected[[0, 1, 3]]).mean() > 0.05
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    write_sentence_transformers(folder, pooling, normalize=normalize)
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-5)
    assert model.max_seq_length == 32
    check_target(folder)  # an export with these files may be replaced


@pytest.mark.usefixtures("unverified")
def test_the_mean_over_all_tokens_is_what_other_servers_have(exported: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = discern.load(exported)
    (inner,), (first,) = model.encode(TEXTS[:1], pooling="none"), model.encode(TEXTS[:1], pooling="first")
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    write_sentence_transformers(folder, "mean-all", max_length=16)
    vectors = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(TEXTS[:1], output_value=None)
    states = vectors[0]["token_embeddings"].numpy()
    np.testing.assert_allclose(states[1:-1], inner, atol=1e-5)
    np.testing.assert_allclose(states[0], first, atol=1e-5)
    np.testing.assert_allclose(vectors[0]["sentence_embedding"].numpy(), states.mean(0), atol=1e-5)
    settings = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert settings["pooling_mode_mean_tokens"]
    assert settings["word_embedding_dimension"] == model.hidden_size
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 16
    assert discern.load(folder).max_length == 16


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("stated", [2, True, "64"])
def test_a_length_that_is_none_is_refused(exported: Path, tmp_path: Path, stated: object) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    write_sentence_transformers(folder, "mean")
    write_recorded(folder, {"sentence_bert_config.json": json.dumps({"max_seq_length": stated})})
    with pytest.raises(CheckpointError, match=r"sentence_bert_config.json: max_seq_length is .* expected a number of tokens"):
        discern.load(folder)


def test_the_list_of_words_reaches_the_largest_id(tmp_path: Path) -> None:
    """A vocabulary with a line that occurs twice has fewer entries than ids."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "a", "c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    listed = _without_frame(load_tokenizer(tmp_path / "vocab.txt"))["vocab"]
    assert len(listed) == len(words)
    assert listed[8] == "c"


def test_an_unknown_pooling_is_refused(exported: Path) -> None:
    with pytest.raises(ConfigError, match="unknown pooling 'means'") as caught:
        write_sentence_transformers(exported, "means")
    assert "did you mean 'mean'" in (caught.value.hint or "")


@pytest.mark.parametrize(("kind", "read"), [("xlnet", "cls"), ("bert", None)])
def test_the_last_token_is_cls_in_xlnet_only(tmp_path: Path, kind: str, read: str | None) -> None:
    (tmp_path / "1_Pooling").mkdir()
    files = {
        "config.json": {"model_type": kind},
        "modules.json": [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}],
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    if read is not None:
        assert read_pooling(tmp_path) == StoredPooling(read, normalize=False)
    else:
        with pytest.raises(ConfigError, match="pooling by the last token, which discern does not have"):
            read_pooling(tmp_path)
