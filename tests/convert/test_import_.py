"""`discern import`: somebody else's model becomes a folder that every verb takes, with the same numbers."""

from __future__ import annotations

import functools
import json
import pickle
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

from discern.artifacts.opening import open_model
from discern.convert.export import export
from discern.convert.import_ import Imported, import_model
from discern.data.tokenizer import load_tokenizer
from discern.errors import CheckpointError, ConfigError, DataError, DiscernError, NumericsError
from discern.inference.detection import detect
from discern.inference.scoring import load_scorer
from discern.interop.huggingface import network_from_huggingface
from discern.progress import Silent
from tests.interop.small_tokenizers import small_tokenizer
from tests.parity.small_networks import make_noisy
from tests.small.run import make_run
from tests.support import run_python

RELEASED = Path(__file__).parents[1] / "interop" / "data" / "electra-tiny"
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 40}
TEXT = "The chef cooked the meal, and naive guests ate."
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "embedding_size": 16}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "embedding_size": 16}


tokenizer_of = functools.cache(small_tokenizer)  # trained anew, it would have its entries in another order


def saved(folder: Path, architecture: str, *, tokenizer: str | None = "wordpiece, lower-cased", **changes: Any) -> Any:
    """Somebody else's model in a folder, with its tokenizer as transformers 4 saved it."""
    built = tokenizer_of(tokenizer or "wordpiece, lower-cased")
    family = transformers.BertConfig if architecture.startswith("Bert") else transformers.ElectraConfig
    settings = {**SIZES, **WIDTHS, "vocab_size": built.get_vocab_size(), **changes}
    if family is transformers.BertConfig:
        del settings["embedding_size"]
    model = getattr(transformers, architecture)(family(**settings))
    make_noisy(model)
    model.tie_weights()
    model.eval().save_pretrained(folder)
    if tokenizer is not None:
        words = sorted(built.get_vocab(), key=built.get_vocab().__getitem__)
        (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
        (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 40}')
    return model


def imported(out: Path, *sources: Path, **options: Any) -> Imported:
    return import_model(sources, out=out, progress=Silent(), warn=lambda message: None, **options)


def ids_of(folder: Path) -> torch.Tensor:
    return torch.tensor([load_tokenizer(folder).encode(TEXT).ids])


@torch.no_grad()
def test_a_discriminator_judges_as_in_transformers(tmp_path: Path) -> None:
    model = saved(tmp_path / "theirs", "ElectraForPreTraining")
    done = imported(tmp_path / "ours", tmp_path / "theirs")
    assert list(done.model.models) == ["discriminator"]
    assert not done.measurable
    found = detect(tmp_path / "ours", [TEXT], Silent(), pytest.fail)[0].replaced_probability
    expected = torch.sigmoid(model(ids_of(tmp_path / "theirs")).logits)[0, 1:-1].tolist()
    assert found == pytest.approx(expected, abs=1e-5)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert again(TEXT)["input_ids"] == ids_of(tmp_path / "theirs")[0].tolist()


@pytest.mark.parametrize("architecture", ["ElectraForMaskedLM", "BertForMaskedLM", "BertForPreTraining"])
@torch.no_grad()
def test_a_masked_language_model_predicts_as_in_transformers(architecture: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "theirs", architecture)
    done = imported(tmp_path / "ours", tmp_path / "theirs")
    bert = architecture.startswith("Bert")
    assert list(done.model.models) == ["encoder" if bert else "generator"]
    ids = ids_of(tmp_path / "theirs")
    outputs = model(ids)
    expected = outputs.prediction_logits if architecture == "BertForPreTraining" else outputs.logits
    torch.testing.assert_close(network_from_huggingface(tmp_path / "ours").token_logits(ids), expected, atol=1e-5, rtol=0)
    if bert:
        assert open_model(tmp_path / "ours", warn=pytest.fail).evaluation_config.objective.name == "mlm"
    assert done.model.left_out == (["bert.pooler.dense", "cls.seq_relationship"] if "PreTraining" in architecture else [])


@pytest.mark.parametrize(
    ("architecture", "left_out"),
    [
        ("ElectraModel", []),
        ("BertModel", ["pooler.dense"]),
        ("ElectraForSequenceClassification", ["classifier.dense", "classifier.out_proj"]),
    ],
)
@torch.no_grad()
def test_an_encoder_to_start_from(architecture: str, left_out: list[str], tmp_path: Path) -> None:
    model = saved(tmp_path / "theirs", architecture)
    done = imported(tmp_path / "ours", tmp_path / "theirs")
    assert list(done.model.models) == ["encoder"]
    assert done.model.left_out == left_out
    ids = ids_of(tmp_path / "theirs")
    expected = getattr(model, model.base_model_prefix, model)(ids).last_hidden_state
    encoder = open_model(tmp_path / "ours", warn=pytest.fail).encoder
    torch.testing.assert_close(encoder.encoder(ids), expected, atol=1e-5, rtol=0)
    theirs, info = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(theirs.eval()(ids).last_hidden_state, expected, atol=1e-5, rtol=0)


def test_both_networks_from_two_folders_in_any_order(tmp_path: Path) -> None:
    saved(tmp_path / "d", "ElectraForPreTraining")
    generator = saved(tmp_path / "g", "ElectraForMaskedLM", **SMALL)
    done = imported(tmp_path / "ours", tmp_path / "g", tmp_path / "d")
    assert list(done.model.models) == ["discriminator", "generator"]
    assert not (tmp_path / "ours" / "discriminator").exists()
    network = network_from_huggingface(tmp_path / "ours" / "generator")
    with torch.no_grad():
        ids = ids_of(tmp_path / "d")
        torch.testing.assert_close(network.token_logits(ids), generator(ids).logits, atol=1e-5, rtol=0)
    # Two heads of one and one of the other are in no proportion that the settings know.
    assert not done.measurable


def test_a_pair_that_settings_describe_can_be_measured(tmp_path: Path) -> None:
    saved(tmp_path / "d", "ElectraForPreTraining", num_attention_heads=1)
    saved(tmp_path / "g", "ElectraForMaskedLM", num_attention_heads=1, **SMALL)
    assert imported(tmp_path / "ours", tmp_path / "d", tmp_path / "g").measurable
    loaded = open_model(tmp_path / "ours", warn=pytest.fail)
    assert loaded.evaluation_config.objective.tying == "none"  # type: ignore[attr-defined]
    assert loaded.evaluation_config.objective.generator_size == 0.5  # type: ignore[attr-defined]
    network, again = loaded.objective.networks()["generator"], network_from_huggingface(tmp_path / "ours" / "generator")
    with torch.no_grad():
        assert torch.equal(network.token_logits(ids_of(tmp_path / "d")), again.token_logits(ids_of(tmp_path / "d")))


def test_a_released_checkpoint_is_whole(tmp_path: Path) -> None:
    done = imported(tmp_path / "ours", RELEASED / "model.ckpt-7.index")
    assert done.measurable
    assert done.model.step == 7
    loaded = open_model(tmp_path / "ours", warn=pytest.fail)
    assert loaded.step == 7
    assert loaded.evaluation_config.objective.tying == "embeddings"  # type: ignore[attr-defined]
    assert loaded.evaluation_config.objective.generator_size == 0.5  # type: ignore[attr-defined]
    assert loaded.objective.networks()["generator"].encoder.embeddings is (
        loaded.objective.networks()["discriminator"].encoder.embeddings
    )
    assert "step 7" in open_model(tmp_path / "ours", warn=pytest.fail).encoder.description
    assert load_tokenizer(tmp_path / "ours").encode("The Über cats", add_special_tokens=False).tokens == (
        ["the", "über", "cat", "##s"]
    )
    card = (tmp_path / "ours" / "README.md").read_text()
    for line in ("license:\n", "| Steps | 7 |", "Adam's slots", "--heads", "| Seed | not recorded |", "generator/"):
        assert line in card, line


def test_what_was_guessed_is_said(tmp_path: Path) -> None:
    warned: list[str] = []
    import_model([RELEASED], out=tmp_path / "a", progress=Silent(), warn=warned.append)
    assert any("--heads" in message for message in warned)
    assert any("lower-cased with their accents kept, by the entries of vocab.txt" in message for message in warned)
    warned.clear()
    done = import_model([RELEASED], out=tmp_path / "b", lowercase=False, heads=1, progress=Silent(), warn=warned.append)
    assert not warned
    assert done.tokenizer == "cased, as asked for"


@pytest.mark.parametrize(
    ("entries", "lowercase", "manner"),
    [
        (["cat", "dog"], None, "lower-cased, by the entries"),
        (["cat", "Dog"], None, "cased, by the entries"),
        (["cat", "naïve"], None, "lower-cased with their accents kept, by the entries"),
        # Hangul comes apart where accents are stripped, and no entry would be found again.
        (["고양이", "개"], None, "lower-cased with their accents kept, by the entries"),
        (["cat", "Dog"], True, "lower-cased, as asked for"),
    ],
)
def test_the_casing_of_a_bare_vocabulary(entries: list[str], lowercase: bool | None, manner: str, tmp_path: Path) -> None:
    from discern.interop.vocabulary import find_tokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *entries]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    found = find_tokenizer(tmp_path, None, lowercase)
    assert found.manner.startswith(manner)
    assert found.judged is (lowercase is None)
    if lowercase is None:
        assert found.tokenizer.encode(entries[-1], add_special_tokens=False).tokens == [entries[-1]]


@pytest.mark.parametrize(
    ("settings", "entries", "lowercase", "manner", "judged"),
    [
        # Nothing is said of casing: as though the file were not there.
        ({}, ["cat", "Dog"], None, "cased, by the entries of vocab.txt", True),
        ({}, ["cat", "naïve"], None, "lower-cased with their accents kept, by the entries of vocab.txt", True),
        ({"do_lower_case": None}, ["cat", "Dog"], None, "cased, by the entries of vocab.txt", True),
        ({}, ["cat", "naïve"], True, "lower-cased with their accents kept, as asked for", False),
        # What is said of accents holds, whatever the entries tell.
        ({"strip_accents": True}, ["cat", "naïve"], None, "lower-cased, by the entries of vocab.txt", True),
        ({"strip_accents": False}, ["cat"], None, "lower-cased with their accents kept, by the entries of vocab.txt", True),
        ({"strip_accents": True}, ["Cat"], False, "cased without accents, as asked for", False),
        # Casing is said, and asked for otherwise.
        ({"do_lower_case": False}, ["cat", "Dog"], None, "cased, as tokenizer_config.json says", False),
        ({"do_lower_case": True}, ["cat", "naïve"], None, "lower-cased, as tokenizer_config.json says", False),
        ({"do_lower_case": True}, ["cat", "naïve"], True, "lower-cased, as asked for", False),
        ({"do_lower_case": True}, ["cat", "Dog"], False, "cased, as asked for", False),
        (
            {"do_lower_case": False, "strip_accents": False},
            ["cat"],
            True,
            "lower-cased with their accents kept, as asked for",
            False,
        ),
    ],
)
def test_the_casing_of_a_vocabulary_with_settings(
    settings: dict[str, Any], entries: list[str], lowercase: bool | None, manner: str, judged: bool, tmp_path: Path
) -> None:
    from discern.interop.vocabulary import find_tokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *entries]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 40}))
    found = find_tokenizer(tmp_path, None, lowercase)
    assert (found.manner, found.judged) == (manner, judged)
    seen = found.tokenizer.normalizer.normalize_str("Ï")
    expected = (
        "i" if manner.startswith("lower-cased,") else "ï" if manner.startswith("lower") else "I" if "without" in manner else "Ï"
    )
    assert seen == expected


def test_settings_on_ideographs_hold_where_the_casing_is_judged(tmp_path: Path) -> None:
    from discern.interop.vocabulary import find_tokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "天气"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenize_chinese_chars": false}')
    found = find_tokenizer(tmp_path, None, None)
    assert found.judged
    assert found.tokenizer.encode("天气", add_special_tokens=False).tokens == ["天气"]


def test_the_weights_may_be_an_old_pickle_of_tensors(tmp_path: Path) -> None:
    model = saved(tmp_path / "theirs", "ElectraForPreTraining")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "theirs" / "pytorch_model.bin")
    imported(tmp_path / "ours", tmp_path / "theirs")
    with torch.no_grad():
        ids = ids_of(tmp_path / "theirs")
        ours = network_from_huggingface(tmp_path / "ours").token_logits(ids)
        torch.testing.assert_close(ours, model(ids).logits, atol=1e-5, rtol=0)


class Trap:
    """What a pickle can do to whoever opens it."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("sprung"),)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "theirs", "ElectraForPreTraining")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save({"weight": Trap()}, tmp_path / "theirs" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="possibly code"):
        imported(tmp_path / "ours", tmp_path / "theirs")
    (tmp_path / "theirs" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="possibly code"):
        imported(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "ours").exists()


def refused(tmp_path: Path, error: type[DiscernError], said: str, *sources: Path, **options: Any) -> str:
    """The whole message; nothing has been written."""
    with pytest.raises(error, match=said) as caught:
        imported(tmp_path / "out", *sources, **options)
    assert not (tmp_path / "out").exists()
    assert caught.value.hint
    return str(caught.value)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path, DataError, "empty is not a model: it contains neither config.json nor the .index", tmp_path / "empty")
    refused(tmp_path, DataError, "absent does not exist", tmp_path / "absent")
    refused(tmp_path, DataError, r"absent\.index does not exist", tmp_path / "absent.index")
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "checkpoint").write_text('model_checkpoint_path: ""\n')
    refused(tmp_path, DataError, "named is not a model: it contains neither config.json nor the .index", tmp_path / "named")
    refused(tmp_path, DataError, "vocab.txt is neither a folder nor a file of a TensorFlow checkpoint", RELEASED / "vocab.txt")
    make_run(tmp_path / "run")
    assert "discern export" in refused(tmp_path, ConfigError, "run is a run of discern", tmp_path / "run")
    imported(tmp_path / "ours", RELEASED)
    assert "discern export" in refused(tmp_path, ConfigError, "ours is an export of discern", tmp_path / "ours")
    refused(tmp_path, ConfigError, "3 sources", RELEASED, RELEASED, RELEASED)


def test_what_is_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "d", "ElectraForPreTraining")
    path = tmp_path / "d" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "gpt2"}))
    refused(tmp_path, CheckpointError, "model_type is 'gpt2', expected 'electra' or 'bert'", tmp_path / "d")
    path.write_text(json.dumps(config | {"hidden_act": "relu"}))
    refused(tmp_path, CheckpointError, "hidden_act is 'relu'", tmp_path / "d")
    path.write_text(json.dumps(config | {"num_hidden_layers": 1}))
    refused(tmp_path, CheckpointError, r"unexpected tensor 'electra\.encoder\.layer\.1", tmp_path / "d")
    path.write_text(json.dumps(config | {"num_hidden_layers": 3}))
    refused(tmp_path, CheckpointError, r"'electra\.encoder\.layer\.2.* is missing, and 15 more", tmp_path / "d")
    path.write_text(json.dumps(config))
    refused(tmp_path, ConfigError, "--heads is for TensorFlow", tmp_path / "d", heads=4)
    refused(tmp_path, ConfigError, "contains the discriminator, .* the discriminator", tmp_path / "d", tmp_path / "d")
    saved(tmp_path / "g", "ElectraForMaskedLM", tokenizer="wordpiece, cased", **SMALL)
    refused(tmp_path, DataError, "different vocabularies", tmp_path / "d", tmp_path / "g")
    weights = tmp_path / "d" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    refused(tmp_path, CheckpointError, "model.safetensors is damaged", tmp_path / "d")


@pytest.mark.parametrize("value", [10**9, -1, 0, 1.5, float("nan"), "12", True, [2]])
@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "n_head"])
def test_sizes_beyond_reason_are_refused_at_once(key: str, value: object, tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    source.mkdir()
    tokenizer_of("wordpiece, lower-cased").save(str(source / "tokenizer.json"))
    config: dict[str, Any] = {"model_type": "electra", **SIZES, **WIDTHS, "vocab_size": 97}
    if key.startswith("n_"):
        config = {"model_type": "xlnet", "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48, "vocab_size": 97}
    torch.save({}, source / "pytorch_model.bin")
    (source / "config.json").write_text(json.dumps(config | {key: value}))
    refused(tmp_path, CheckpointError, rf"config\.json: {key} is ", source)


def test_a_model_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "d", "ElectraForPreTraining", tokenizer=None)
    assert "--tokenizer PATH" in refused(tmp_path, DataError, "d has no tokenizer", tmp_path / "d")
    shutil.copytree(RELEASED, tmp_path / "tf")
    (tmp_path / "tf" / "vocab.txt").unlink()
    refused(tmp_path, DataError, "tf has no tokenizer", tmp_path / "tf")
    imported(tmp_path / "given", tmp_path / "tf", tokenizer=RELEASED / "vocab.txt")
    (tmp_path / "larger.txt").write_text((RELEASED / "vocab.txt").read_text() + "more\n")
    refused(
        tmp_path,
        DataError,
        "47 entries, but the embeddings have only 46 rows",
        tmp_path / "tf",
        tokenizer=tmp_path / "larger.txt",
    )


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "d", "ElectraForPreTraining")
    with torch.no_grad():
        model.electra.embeddings.LayerNorm.weight[3] = float("nan")
    model.save_pretrained(tmp_path / "d")
    refused(tmp_path, NumericsError, "not finite", tmp_path / "d")


def test_an_output_matrix_of_its_own_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path / "g", "ElectraForMaskedLM", **SMALL)
    path = tmp_path / "g" / "model.safetensors"
    tensors = load_file(path)
    table = tensors["electra.embeddings.word_embeddings.weight"]
    save_file(tensors | {"generator_lm_head.weight": table + 1}, path, {"format": "pt"})
    refused(tmp_path, CheckpointError, "differs from the word embeddings", tmp_path / "g")


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_source_gives_the_same_bytes_and_replaces_itself(tmp_path: Path) -> None:
    imported(tmp_path / "ours", RELEASED)
    before = files_in(tmp_path / "ours")
    imported(tmp_path / "ours", RELEASED)
    assert files_in(tmp_path / "ours") == before
    assert not any(str(tmp_path).encode() in content for content in before.values())


def test_an_import_goes_out_again(tmp_path: Path) -> None:
    imported(tmp_path / "ours", RELEASED)
    whole = export(tmp_path / "ours", out=tmp_path / "all", all_networks=True, progress=Silent(), warn=pytest.fail)
    assert whole.networks == ("discriminator", "generator")
    before, after = files_in(tmp_path / "ours"), files_in(tmp_path / "all")
    assert {name for name in before if before[name] != after[name]} == {"README.md"}
    done = export(
        tmp_path / "ours", out=tmp_path / "g", network="generator", precision="bfloat16", progress=Silent(), warn=pytest.fail
    )
    assert (done.networks, done.architecture, done.step) == (("generator",), "ElectraForMaskedLM", 7)
    assert not (tmp_path / "g" / "discern.toml").exists()
    assert list(open_model(tmp_path / "g", warn=pytest.fail).networks(beside=False)) == ["generator"]
    card = (tmp_path / "g" / "README.md").read_text()
    assert "| Weights stored as | bfloat16 |" in card
    assert "> # ours" in card, "the card that came with it is kept"
    assert card.count("license:") == 1
    for source, out, options, said in (
        ("g", "x", {"network": "discriminator"}, "has no network 'discriminator'"),
        ("ours", "x", {"network": "generator", "all_networks": True}, "the discriminator is at the root"),
        ("ours", "x", {"precision": "float8"}, "unknown precision 'float8'"),
        ("ours", "ours", {}, "cannot replace itself"),
    ):
        with pytest.raises(ConfigError, match=said):
            export(tmp_path / source, out=tmp_path / out, progress=Silent(), warn=pytest.fail, **cast(Any, options))


def test_the_command(tmp_path: Path) -> None:
    discern = functools.partial(run_python, "-m", "discern")
    done = discern("import", RELEASED, "--out", tmp_path / "ours", "--heads", 1, "--json")
    assert done.returncode == 0, done.stderr
    # tokenizers before 0.23 prints a line of its own, because this vocabulary lacks an index.
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["networks"] == ["discriminator", "generator"]
    assert values["architecture"] == "ElectraForPreTraining"
    assert (values["step"], values["vocab_size"], values["measurable"]) == (7, 46, True)
    shown = discern("import", RELEASED, "--out", tmp_path / "ours").stdout
    assert "discriminator: 4,637 parameters, 2 layers of 12" in shown
    assert "not imported: Adam's slots" in shown
    (tmp_path / "empty").mkdir()
    done = discern("import", tmp_path / "empty", "--out", tmp_path / "q")
    assert done.returncode == 1
    assert "is not a model" in done.stderr
    assert "hint:" in done.stderr


@pytest.mark.parametrize(
    ("architecture", "left_out"),
    [
        ("XLNetLMHeadModel", []),
        ("XLNetModel", []),
        ("XLNetForSequenceClassification", ["logits_proj", "sequence_summary.summary"]),
    ],
)
@torch.no_grad()
def test_an_xlnet_is_brought_in(architecture: str, left_out: list[str], tmp_path: Path) -> None:
    built = tokenizer_of("unigram")
    sizes = transformers.XLNetConfig(vocab_size=built.get_vocab_size(), d_model=32, n_layer=2, n_head=2, d_inner=48, clamp_len=5)
    model = getattr(transformers, architecture)(sizes)
    make_noisy(model)
    model.eval().save_pretrained(tmp_path / "theirs")
    built.save(str(tmp_path / "theirs" / "tokenizer.json"))
    done = imported(tmp_path / "ours", tmp_path / "theirs")
    assert (list(done.model.models), done.model.left_out) == (["encoder"], left_out)
    ids = torch.randint(5, built.get_vocab_size(), (2, 9), generator=torch.Generator().manual_seed(0))
    expected = getattr(model, "transformer", model)(ids).last_hidden_state
    encoder = open_model(tmp_path / "ours", warn=pytest.fail).encoder
    assert encoder.max_length == 512
    torch.testing.assert_close(encoder.encoder(ids), expected, atol=1e-5, rtol=1e-5)
    theirs, info = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(theirs.eval()(ids).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert again.convert_ids_to_tokens(again(TEXT)["input_ids"])[-2:] == ["[SEP]", "[CLS]"]
    card = (tmp_path / "ours" / "README.md").read_text()
    assert "- xlnet\n" in card
    assert f"`{'XLNetLMHeadModel' if done.measurable else 'XLNetModel'}`" in card
    assert done.measurable == (architecture == "XLNetLMHeadModel")
    if done.measurable:
        loaded = open_model(tmp_path / "ours", warn=pytest.fail)
        network = loaded.objective.networks()["encoder"]
        torch.testing.assert_close(network.token_logits(ids), model(ids).logits, atol=1e-5, rtol=1e-5)
        assert load_scorer(tmp_path / "ours", warn=pytest.fail).name == "permutation-lm"
