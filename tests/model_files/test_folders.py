"""`open_model`: what runs, exports, fine-tuned models and folders of others hold, and the encoders to fine-tune."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM

from discern.data.tokenizer import vocab_size
from discern.doctor.files import accept_folder
from discern.errors import CheckpointError, ConfigError, DataError, DiscernError
from discern.model_files.export import export
from discern.model_files.folder import LoadedEncoder, choose_encoder, draw_weights, first_layers, holds_model, open_model
from discern.model_files.hub import WEIGHTS_NAME
from discern.model_files.huggingface import SETTINGS_NAME, network_to_huggingface
from discern.models.base import build_embeddings, build_encoder
from discern.progress import Silent
from tests.parity.small_networks import VOCABULARY, build, make_noisy, sizes
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import make_run
from tests.small.tokenizers import KINDS, small_tokenizer

IDS = torch.arange(5, 15).view(2, 5)
TOKENIZER = small_tokenizer("wordpiece, lower-cased")


def opened(folder: Any) -> Any:
    return open_model(folder, warn=pytest.fail)


def exported(source: Path, out: Path, **options: Any) -> Path:
    return export(source, out=out, progress=Silent(), warn=pytest.fail, **options).folder


@pytest.fixture
def whole(small_model: Path, tmp_path: Path) -> Path:
    """An export of both networks."""
    return exported(small_model, tmp_path / "whole", all_networks=True)


def bert(folder: Path, rows: int) -> Path:
    """Somebody else's BERT with its tokenizer."""
    widths: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = BertConfig(vocab_size=rows, max_position_embeddings=40, initializer_range=0.05, **widths)
    BertForMaskedLM(config).save_pretrained(folder)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("tying", ["embeddings", "token", "none", "gradient-disentangled"])
@pytest.mark.parametrize("head", ["dense", "bilinear"])
@torch.no_grad()
def test_a_run_and_its_export_hold_the_same(tying: str, head: str, tmp_path: Path) -> None:
    settings = [f"objective.tying={tying}", f"objective.discriminator_head={head}", "model.initialization=local"]
    objective = make_run(tmp_path / "run", overrides=[*settings, "data.sequence_length=24"], step=22_000)
    out = exported(tmp_path / "run", tmp_path / "out", all_networks=True)
    expected = objective.networks()["discriminator"].encoder(IDS)
    run, other = models = [opened(folder) for folder in (tmp_path / "run", out)]
    assert [model.description for model in models] == [f"run {run.folder} at step 22,000", f"export {out} of step 22,000"]
    with pytest.raises(DataError, match=f"{tmp_path / 'data'} is not a data set: there is no such folder"):
        run.open_data()
    assert other.open_data() is None
    tensors = dict(objective.named_parameters())
    for model in models:
        assert opened(model) is model
        assert (list(model.networks()), model.max_length, model.step) == (["discriminator", "generator"], 24, 22_000)
        encoder, loaded = model.encoder.encoder, model.objective
        assert not any(part.training for part in (*encoder.modules(), *loaded.modules()))
        assert all(value.requires_grad for value in encoder.parameters())
        torch.testing.assert_close(encoder(IDS), expected)
        # The weights are held once.
        assert encoder.blocks is model.networks()["discriminator"].encoder.blocks
        assert model.encoder.encoder is encoder
        assert tensors.keys() == dict(loaded.named_parameters()).keys()
        for name, tensor in loaded.named_parameters():
            torch.testing.assert_close(tensor, tensors[name], atol=1e-6, rtol=0)
        with pytest.raises(DataError, match="task head"):
            model.task_model()
    assert run.config == other.config
    assert run.encoder.source_fingerprint == other.encoder.source_fingerprint
    fresh = [choose_encoder(str(model.folder), None, untrained=True, warn=pytest.fail) for model in models]
    assert fresh[0].source_fingerprint == fresh[1].source_fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizers_that_fit_a_model_are_known(kind: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tokenizer=kind)
    before = opened(tmp_path / "run").tokenizer_fingerprints
    after = opened(exported(tmp_path / "run", tmp_path / "out")).tokenizer_fingerprints
    assert after[: len(before)] == before
    # In exports of BPE and Unigram, the mask includes the space before it, which is another declaration.
    assert len(after) == 1 + (kind in ("bpe", "unigram"))
    TOKENIZER.save(str(tmp_path / "run" / "tokenizer.json"))
    assert opened(tmp_path / "run").tokenizer_fingerprints == before, "the ids are those of the data set"


@torch.no_grad()
def test_a_fine_tuned_model_and_its_export_hold_the_same(tmp_path: Path) -> None:
    tuned = opened(make_finetuned(tmp_path / "tuned", seeds=2, own=SINGLE))
    other = opened(exported(tuned.folder, tmp_path / "out"))
    states = []
    for model in (tuned, other):
        task = model.task_model()
        assert holds_model(model.folder)
        assert model.task_model() is task
        assert model.encoder.encoder is task.objective.encoder
        assert (task.seed, task.task().labels.names) == (1, SINGLE.labels.names)
        assert (model.provenance, model.max_length) == ({"languages": ["de"], "licenses": ["CC0"]}, 32)
        assert model.tokenizer_fingerprints[0] == tuned.record["tokenizer_fingerprint"]
        states.append(model.encoder.encoder(IDS))
        with pytest.raises(DiscernError, match="fine-tuned"):
            model.networks()
        with pytest.raises(ConfigError, match="was not fine-tuned on 'won'"):
            task.task("won")
        with pytest.raises(ConfigError, match=r"no seed 7|a single set"):
            model.task_model(7)
    torch.testing.assert_close(*states)
    assert not torch.equal(tuned.task_model(0).objective.encoder(IDS), states[0])
    (tuned.folder / "seed-1" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        opened(tuned.folder).task_model()


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("name", ["discriminator", "generator"])
def test_a_model_of_somebody_else_is_named_by_what_it_does(name: str, tmp_path: Path) -> None:
    network_to_huggingface(build(sizes()).networks()[name], VOCABULARY.special).write(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    model = opened(tmp_path)
    assert list(model.networks()) == [name]
    assert (model.step, model.config, model.provenance) == (None, None, {})
    with pytest.raises(ConfigError, match="lacks the settings"):
        assert model.objective


def test_a_bert_of_somebody_else_and_its_tokenizer(tmp_path: Path) -> None:
    entries = vocab_size(TOKENIZER)
    loaded = opened(bert(tmp_path, entries + 3)).encoder
    assert loaded.description == f"Hugging Face bert folder {tmp_path}"
    assert (loaded.vocabulary_size, loaded.max_length) == (entries + 3, 40)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 32}))
    assert opened(tmp_path).encoder.max_length == 32
    tensors = load_file(tmp_path / WEIGHTS_NAME)
    for name, same in (("cls.predictions.bias", True), ("bert.embeddings.LayerNorm.bias", False)):
        tensors[name] += 1
        save_file(tensors, tmp_path / WEIGHTS_NAME)
        assert (opened(tmp_path).encoder.source_fingerprint == loaded.source_fingerprint) == same
    with pytest.raises(DataError, match="only"):
        assert opened(bert(tmp_path, entries - 1)).encoder
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"neither tokenizer\.json nor"):
        assert opened(tmp_path).encoder


def test_what_a_copy_lacks_is_named(whole: Path) -> None:
    shutil.rmtree(whole / "generator")
    assert list(opened(whole).networks(beside=False)) == ["discriminator"]
    with pytest.raises(CheckpointError, match=r"generator/config\.json is missing"):
        opened(whole).networks()
    (whole / SETTINGS_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"discern\.toml is missing"):
        assert opened(whole).objective
    accept_folder(whole)
    with pytest.raises(ConfigError, match="lacks the settings"):
        assert opened(whole).objective


def test_parts_of_an_export(small_model: Path, whole: Path, tmp_path: Path) -> None:
    half = opened(exported(small_model, tmp_path / "half", network="generator", precision="float16"))
    beside = opened(whole / "generator")
    assert list(half.networks()) == list(beside.networks()) == ["generator"]
    assert {value.dtype for value in half.encoder.encoder.parameters()} == {torch.float32}
    with pytest.raises(ConfigError, match="only the discriminator, but evaluation also requires the generator"):
        assert opened(exported(small_model, tmp_path / "alone")).objective
    for kind in (AutoModel, AutoTokenizer):  # what transformers saves has no checksums
        kind.from_pretrained(whole).save_pretrained(tmp_path / "saved")
    assert opened(tmp_path / "saved").encoder.encoder.config == opened(whole).encoder.encoder.config
    for name in ("config.json", WEIGHTS_NAME):  # a generator of others has no tokenizer of its own
        (tmp_path / "saved" / "generator").mkdir(exist_ok=True)
        shutil.copy(tmp_path / "alone" / name, tmp_path / "saved")
        shutil.copy(whole / "generator" / name, tmp_path / "saved" / "generator")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    del config["discern"]
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    assert list(opened(tmp_path / "saved").networks()) == ["discriminator", "generator"]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "nowhere", "does not exist"), (tmp_path, "neither a run nor")):
        assert not holds_model(folder)
        with pytest.raises(DataError, match=said):
            opened(folder)
    (tmp_path / "config.json").write_text('{"model_type": "roberta", "vocab_size": 9}')
    for name in ("networks", "encoder", "max_length"):
        with pytest.raises(CheckpointError, match="model_type is 'roberta'"):
            getattr(opened(tmp_path), name)()


def test_an_untrained_encoder(tmp_path: Path) -> None:
    fresh = choose_encoder(str(bert(tmp_path, 300)), None, untrained=True, warn=pytest.fail)
    # The cut at two deviations leaves 0.88 of the range that config.json states.
    assert float(fresh.encoder.embeddings.weights.detach().std()) == pytest.approx(0.88 * 0.05, rel=0.05)
    assert (fresh.trained, fresh.encoder.training) == (False, False)
    words, drawn = fresh.encoder.embeddings.weights, fresh.encoder.embeddings.weights.detach().clone()
    draw_weights(fresh.encoder, 1)
    assert not torch.equal(words, drawn)
    draw_weights(fresh.encoder, 0)
    assert torch.equal(words, drawn)
    fresh.encoder.load_state_dict(opened(tmp_path).encoder.encoder.state_dict())  # of the same sizes
    preset = choose_encoder("tiny", tmp_path / "tokenizer.json", untrained=False, warn=pytest.fail)
    assert not preset.trained
    assert preset.encoder.config == make_run(tmp_path / "run").networks()["discriminator"].encoder.config
    with pytest.raises(DataError, match=r"(?s)no folder tinny.*'tiny'"):
        choose_encoder("tinny", tmp_path, untrained=False, warn=pytest.fail)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@torch.no_grad()
def test_the_first_layers_compute_what_they_did_in_the_whole(kind: str, tmp_path: Path) -> None:
    config = sizes(encoder=kind, num_layers=3, embedding_size=32)
    encoder = build_encoder(build_embeddings(vocab_size(TOKENIZER), 32, config), config)
    make_noisy(encoder)
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    loaded = LoadedEncoder(encoder, tmp_path / "tokenizer.json", 24, "a model")
    part = first_layers(loaded, 2)
    states: list[torch.Tensor] = []
    for each in (loaded, part):
        # The first alone: the last block of a ModernBERT computes no LayerNorm for a next one.
        each.encoder.repeated_blocks()[0].register_forward_hook(lambda _, __, output: states.append(output))
        each.encoder(IDS)
    torch.testing.assert_close(*states)
    assert len(part.encoder.repeated_blocks()) == part.encoder.config.num_layers == 2
    weights = dict(encoder.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in part.encoder.named_parameters())
