"""What a MODEL argument may be: a folder, or a preset with a tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from discern.errors import ConfigError, DataError
from discern.finetuning.run import choose_encoder
from discern.model_files.finetuned import FinetunedFolder
from discern.model_files.folder import LoadedEncoder
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import make_run
from tests.small.tokenizers import small_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "run"
    make_run(folder)
    small_tokenizer("wordpiece, lower-cased").save(str(folder.parent / "tokenizer.json"))
    return folder


def chosen(model: str | Path, tokenizer: Path | None = None, *, untrained: bool = False) -> LoadedEncoder:
    return choose_encoder(str(model), tokenizer, untrained=untrained, warn=lambda _: None)


def test_a_folder_gives_its_weights_or_its_sizes(folder: Path) -> None:
    loaded, fresh = chosen(folder), chosen(folder, untrained=True)
    assert (loaded.trained, fresh.trained) == (True, False)
    assert fresh.encoder.config == loaded.encoder.config
    assert fresh.tokenizer_path == loaded.tokenizer_path
    assert not torch.equal(fresh.encoder.embeddings.word.weight, loaded.encoder.embeddings.word.weight)


def test_a_fine_tuned_model_gives_the_encoder_of_its_best_seed(tmp_path: Path) -> None:
    tuned = FinetunedFolder(make_finetuned(tmp_path / "tuned", seeds=2, own=replace(SINGLE, settings={"sequence_length": 16})))
    loaded = chosen(tuned.folder)
    best, other = (tuned.task_model(seed).objective.encoder.state_dict() for seed in (1, 0))
    weights = loaded.encoder.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in best.items())
    assert not any(torch.equal(value, other[name]) for name, value in weights.items())
    assert loaded.trained
    assert loaded.description.endswith("tuned, seed 1")
    assert loaded.max_length == 32  # of the model that was fine-tuned; its task reads 16 tokens


def test_a_preset_takes_a_tokenizer(folder: Path) -> None:
    tokenizer = folder.parent / "tokenizer.json"
    for untrained in (False, True):
        loaded = chosen("tiny", tokenizer, untrained=untrained)
        assert (loaded.trained, loaded.tokenizer_path) == (False, tokenizer)
    with pytest.raises(ConfigError, match="preset tiny has no tokenizer") as caught:
        chosen("tiny")
    assert "--tokenizer PATH" in str(caught.value.hint)


def test_a_folder_named_like_a_preset_is_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tiny").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert chosen("tiny").trained


def test_what_is_neither_is_explained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model has its own") as refused:
        chosen(folder, folder.parent / "tokenizer.json")
    assert refused.value.hint == "leave out --tokenizer"
    with pytest.raises(DataError, match="there is no folder electra-smal, and no preset") as caught:
        chosen("electra-smal")
    assert "did you mean the preset 'electra-small'?" in str(caught.value.hint)
    with pytest.raises(DataError, match=r"holds neither a run nor a config\.json"):
        chosen(tmp_path)
