"""The networks in a folder, of whatever kind, and the objective that they make up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from discern.artifacts.opening import open_model
from discern.convert.export import export
from discern.data.tokenizer import fingerprint, load_tokenizer
from discern.doctor.files import accept_folder
from discern.errors import CheckpointError, ConfigError, DataError
from discern.interop.huggingface import to_huggingface
from discern.models.base import Network
from discern.progress import Silent
from discern.storage.checksums import CHECKSUMS_NAME
from tests.interop.small_tokenizers import KINDS
from tests.parity.small_networks import VOCABULARY, build, sizes
from tests.small.run import make_run

IDS = torch.tensor([[2, 7, 8, 9, 3], [2, 11, 4, 13, 3]])


def exported(run: Path, out: Path, *, all_networks: bool = True) -> Path:
    return export(run, out=out, all_networks=all_networks, progress=Silent(), warn=pytest.fail).folder


@torch.no_grad()
def test_a_run_and_its_export_give_the_same_network(tmp_path: Path) -> None:
    objective = make_run(tmp_path / "run", overrides=["data.sequence_length=24"])
    expected = objective.networks()["discriminator"].token_logits(IDS)
    for folder in (tmp_path / "run", exported(tmp_path / "run", tmp_path / "out")):
        model = open_model(folder, warn=pytest.fail)
        assert next(iter(model.networks())) == "discriminator"
        assert model.max_length == 24
        torch.testing.assert_close(model.networks()["discriminator"].token_logits(IDS), expected, atol=1e-6, rtol=0)


def somebody_elses(folder: Path, network: Network) -> Path:
    folder.mkdir()
    to_huggingface(network, VOCABULARY).write(folder)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    return folder


@pytest.mark.usefixtures("unverified")
def test_somebody_elses_model_is_named_by_what_it_does(tmp_path: Path) -> None:
    networks = build(sizes()).networks()
    for name, network in networks.items():
        somebody_elses(tmp_path / name, network)
        assert list(open_model(tmp_path / name, warn=pytest.fail).networks(beside=False)) == [name]


@pytest.mark.parametrize("tying", ["embeddings", "token", "none", "gradient-disentangled"])
@pytest.mark.parametrize("head", ["dense", "bilinear"])
@torch.no_grad()
def test_an_export_makes_up_the_objective_again(tying: str, head: str, tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", overrides=[f"objective.tying={tying}", f"objective.discriminator_head={head}"])
    loaded = open_model(exported(tmp_path / "run", tmp_path / "out"), warn=pytest.fail)
    assert not loaded.objective.training
    assert loaded.step == 20
    assert loaded.data is None
    tensors = dict(made.named_parameters())
    assert tensors.keys() == dict(loaded.objective.named_parameters()).keys()
    for name, tensor in loaded.objective.named_parameters():
        torch.testing.assert_close(tensor, tensors[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_tokenizer_and_that_of_its_run_are_known(kind: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tokenizer=kind)
    of_run = open_model(tmp_path / "run", warn=pytest.fail).tokenizer_fingerprints
    folder = exported(tmp_path / "run", tmp_path / "out")
    of_export = open_model(folder, warn=pytest.fail).tokenizer_fingerprints
    assert of_export[0] == of_run[0]
    assert fingerprint(load_tokenizer(folder)) in of_export
    # In exports of BPE and Unigram, the mask includes the space before it, which is another declaration.
    assert len(set(of_export)) == 1 or kind in ("bpe", "unigram"), "declaring the tokens that are declared changes nothing"


def test_a_discriminator_alone_makes_up_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    folder = exported(tmp_path / "run", tmp_path / "out", all_networks=False)
    with pytest.raises(ConfigError, match="only the discriminator, but evaluation also requires the generator") as caught:
        assert open_model(folder, warn=pytest.fail).objective
    assert "--all-networks" in str(caught.value.hint)


@pytest.mark.usefixtures("unverified")
def test_somebody_elses_model_makes_up_nothing(tmp_path: Path) -> None:
    for name, missing in (("discriminator", "the generator and the settings"), ("generator", "the settings")):
        somebody_elses(tmp_path / name, build(sizes()).networks()[name])
        with pytest.raises(ConfigError, match=f"lacks {missing} that it was trained with") as caught:
            assert open_model(tmp_path / name, warn=pytest.fail).objective
        assert "discern export RUN --out DIR --all-networks" in str(caught.value.hint)


def test_what_transformers_saves_of_an_export_has_no_checksums(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    make_run(tmp_path / "run")
    folder = exported(tmp_path / "run", tmp_path / "out")
    for kind in (AutoModel, AutoTokenizer):
        kind.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    ours, theirs = (open_model(each, warn=pytest.fail).encoder.encoder for each in (folder, tmp_path / "saved"))
    assert ours.config == theirs.config
    (folder / CHECKSUMS_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"checksums\.json is missing"):
        assert open_model(folder, warn=pytest.fail).encoder


def test_what_is_missing_from_a_copy_is_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    folder = exported(tmp_path / "run", tmp_path / "out")
    (folder / "generator" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"generator has no model\.safetensors"):
        assert open_model(folder, warn=pytest.fail).objective
    assert open_model(folder, warn=pytest.fail).networks(beside=False), "judging needs no generator"
    (folder / "discern.toml").unlink()
    with pytest.raises(CheckpointError, match=r"discern\.toml is missing, which checksums\.json lists"):
        assert open_model(folder, warn=pytest.fail).objective
    accept_folder(folder, lambda change: None)
    with pytest.raises(ConfigError, match=r"lacks the settings that it was trained with \(discern\.toml\)"):
        assert open_model(folder, warn=pytest.fail).objective


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        open_model(tmp_path / "nowhere", warn=pytest.fail)
    with pytest.raises(DataError, match=r"neither a run nor a config\.json"):
        open_model(tmp_path, warn=pytest.fail)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    with pytest.raises(CheckpointError, match="model_type is 'roberta', expected 'electra' or 'bert'"):
        open_model(tmp_path, warn=pytest.fail).networks()


def test_a_network_that_is_missing_is_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    folder = exported(tmp_path / "run", tmp_path / "out")
    assert list(open_model(folder / "generator", warn=pytest.fail).networks()) == ["generator"]
    shutil.rmtree(folder / "generator")
    assert list(open_model(folder, warn=pytest.fail).networks(beside=False)) == ["discriminator"]
    with pytest.raises(CheckpointError, match="lacks the folder 'generator'"):
        open_model(folder, warn=pytest.fail).networks()


def test_the_ids_of_a_run_are_those_of_its_record(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    make_run(tmp_path / "other", tokenizer="wordpiece, cased")
    before = open_model(tmp_path / "run", warn=pytest.fail).tokenizer_fingerprints
    (tmp_path / "run" / "tokenizer.json").write_bytes((tmp_path / "other" / "tokenizer.json").read_bytes())
    assert open_model(tmp_path / "run", warn=pytest.fail).tokenizer_fingerprints == before
