"""`discern import`: somebody else's model becomes a folder that every command takes, with the same numbers."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from discern.data.tokenizer import load_tokenizer
from discern.errors import CheckpointError, ConfigError, DataError, DiscernError, NumericsError
from discern.model_files.export import export
from discern.model_files.folder import open_model
from discern.model_files.import_ import Imported, import_model
from discern.model_files.tokenizer import find_tokenizer
from discern.progress import Silent
from tests.parity.small_networks import make_noisy
from tests.small.run import make_run
from tests.small.tokenizers import small_tokenizer
from tests.support import run_python

RELEASED = Path(__file__).parent / "data" / "electra-tiny"
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 40, "hidden_size": 32}
XLNET_SIZES = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48, "clamp_len": 5}
TEXT = "The chef cooked the meal, and naive guests ate."
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}

tokenizer_of = functools.cache(small_tokenizer)  # trained anew, it would have its entries in another order


def saved(folder: Path, architecture: str, tokenizer: str = "wordpiece, lower-cased", **changes: Any) -> Any:
    """Somebody else's model in a folder, with its tokenizer; that of ELECTRA and BERT as transformers 4 saved it."""
    name = architecture.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
    built = tokenizer_of("unigram" if name == "XLNet" else tokenizer)
    settings = XLNET_SIZES if name == "XLNet" else SIZES | {"intermediate_size": 48}
    settings |= {"embedding_size": 16} if name == "Electra" else {}
    config = getattr(transformers, f"{name}Config")(vocab_size=built.get_vocab_size(), **(settings | changes))
    model = getattr(transformers, architecture)(config)
    make_noisy(model)
    model.tie_weights()
    model.eval().save_pretrained(folder)
    if name == "XLNet":
        built.save(str(folder / "tokenizer.json"))
    else:
        words = sorted(built.get_vocab(), key=built.get_vocab().__getitem__)
        vocabulary(folder, words, do_lower_case=True, model_max_length=40)
    return model


def vocabulary(folder: Path, entries: list[str], **settings: Any) -> None:
    (folder / "vocab.txt").write_text("\n".join(entries) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def small(folder: Path, **changes: Any) -> Any:
    return saved(folder, "ElectraForMaskedLM", hidden_size=16, intermediate_size=24, **changes)


def imported(out: Path, *sources: Path, **options: Any) -> Imported:
    return import_model(sources, out=out, progress=Silent(), warn=lambda message: None, **options)


@pytest.mark.parametrize(
    ("architecture", "network", "objective", "left_out"),
    [
        ("ElectraForPreTraining", "discriminator", None, []),
        ("ElectraForMaskedLM", "generator", None, []),
        ("ElectraModel", "encoder", None, []),
        ("ElectraForSequenceClassification", "encoder", None, ["classifier.dense", "classifier.out_proj"]),
        ("BertForMaskedLM", "encoder", "mlm", []),
        ("BertForPreTraining", "encoder", "mlm", ["bert.pooler.dense", "cls.seq_relationship"]),
        ("BertModel", "encoder", None, ["pooler.dense"]),
        ("XLNetLMHeadModel", "encoder", "permutation-lm", []),
        ("XLNetForSequenceClassification", "encoder", None, ["logits_proj", "sequence_summary.summary"]),
    ],
)
@torch.no_grad()
def test_a_model_computes_what_it_does_in_transformers(
    architecture: str, network: str, objective: str | None, left_out: list[str], tmp_path: Path
) -> None:
    model = saved(tmp_path / "theirs", architecture)
    done = imported(tmp_path / "ours", tmp_path / "theirs")
    assert (list(done.model.models), done.model.left_out) == ([network], left_out)
    opened = open_model(tmp_path / "ours", warn=pytest.fail)
    config = opened.evaluation_config
    assert (config and config.objective.name, done.measurable) == (objective, objective is not None)
    ids = load_tokenizer(tmp_path / "theirs").encode(TEXT).ids
    if architecture.startswith("XLNet"):
        ids = [*ids[1:], ids[0]]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")(TEXT)["input_ids"] == ids
    rows = torch.tensor([ids])
    states = getattr(model, model.base_model_prefix, model)(rows).last_hidden_state
    torch.testing.assert_close(opened.encoder.encoder(rows), states, **CLOSE)
    theirs, info = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(theirs.eval()(rows).last_hidden_state, states, **CLOSE)
    if objective or network != "encoder":
        outputs = model(rows)
        logits = outputs.prediction_logits if architecture == "BertForPreTraining" else outputs.logits
        torch.testing.assert_close(opened.networks()[network].token_logits(rows), logits, **CLOSE)


# Two heads of one and one of the other are in no proportion that the settings know.
@pytest.mark.parametrize(("heads", "positions", "measurable"), [(1, 40, True), (2, 30, False)])
@torch.no_grad()
def test_both_networks_from_two_folders_in_any_order(heads: int, positions: int, measurable: bool, tmp_path: Path) -> None:
    theirs = {
        "discriminator": saved(tmp_path / "d", "ElectraForPreTraining", num_attention_heads=1),
        "generator": small(tmp_path / "g", num_attention_heads=heads, max_position_embeddings=positions),
    }
    done = imported(tmp_path / "ours", tmp_path / "g", tmp_path / "d")
    assert list(done.model.models) == list(theirs)
    assert done.measurable == measurable
    opened = open_model(tmp_path / "ours", warn=pytest.fail)
    assert opened.max_length == positions
    networks = opened.objective.networks() if measurable else opened.networks()
    ids = torch.arange(5, 25)[None]
    for name, model in theirs.items():
        torch.testing.assert_close(networks[name].token_logits(ids), model(ids).logits, **CLOSE)
    if measurable:
        settings: Any = opened.evaluation_config
        assert (settings.objective.tying, settings.objective.generator_size) == ("none", 0.5)


def test_the_command_imports_a_released_checkpoint_whole(tmp_path: Path) -> None:
    out = tmp_path / "ours"
    done = run_python("-m", "discern", "import", RELEASED, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    # What was guessed is said.
    assert "--heads" in done.stderr
    assert "--lowercase or --cased" in done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["networks"] == ["discriminator", "generator"]
    assert (values["step"], values["vocab_size"], values["measurable"]) == (7, 46, True)
    opened = open_model(out, warn=pytest.fail)
    settings: Any = opened.evaluation_config
    assert (opened.step, settings.objective.tying, settings.objective.generator_size) == (7, "embeddings", 0.5)
    both = opened.objective.networks()
    assert both["generator"].encoder.embeddings is both["discriminator"].encoder.embeddings
    tokens = load_tokenizer(out).encode("The Über cats", add_special_tokens=False).tokens
    assert tokens == ["the", "über", "cat", "##s"]
    card = (out / "README.md").read_text()
    for part in ("license:\n", "trained for 7 steps.", "Adam's slots", "--heads", "generator/"):
        assert part in card, part


def test_what_was_asked_for_needs_no_warning(tmp_path: Path) -> None:
    import_model([RELEASED], out=tmp_path / "ours", lowercase=False, heads=1, progress=Silent(), warn=pytest.fail)


@pytest.mark.parametrize(
    ("settings", "entry", "lowercase", "normalized", "source"),
    [
        # Nothing is said of casing.
        ({}, "cat", None, "i", "entries"),
        ({}, "Dog", None, "Ï", "entries"),
        ({}, "naïve", None, "ï", "entries"),
        # Hangul comes apart where accents are stripped, and no entry would be found again.
        ({}, "고양이", None, "ï", "entries"),
        ({}, "Dog", True, "i", "asked"),
        ({}, "naïve", True, "ï", "asked"),
        # What is said of accents holds, whatever the entries tell.
        ({"strip_accents": True}, "naïve", None, "i", "entries"),
        ({"strip_accents": False}, "cat", None, "ï", "entries"),
        ({"strip_accents": True}, "Cat", False, "I", "asked"),
        # Casing is said, and asked for otherwise.
        ({"do_lower_case": False}, "Dog", None, "Ï", "say"),
        ({"do_lower_case": True}, "naïve", None, "i", "say"),
        ({"do_lower_case": True}, "Dog", False, "Ï", "asked"),
        ({"do_lower_case": False, "strip_accents": False}, "cat", True, "ï", "asked"),
        # What is said of ideographs holds where the casing is judged.
        ({"tokenize_chinese_chars": False}, "天气", None, "i", "entries"),
    ],
)
def test_the_casing_of_a_vocabulary(
    settings: dict[str, Any], entry: str, lowercase: bool | None, normalized: str, source: str, tmp_path: Path
) -> None:
    vocabulary(tmp_path, [*SPECIAL, entry], **settings)
    found = find_tokenizer(tmp_path, None, lowercase)
    assert found.tokenizer.normalizer.normalize_str("Ï") == normalized
    assert source in found.manner
    assert found.judged == (source == "entries")
    if found.judged and "strip_accents" not in settings:
        assert found.tokenizer.encode(entry, add_special_tokens=False).tokens == [entry]


def refused(tmp_path: Path, error: type[DiscernError], said: str, *sources: Path, **options: Any) -> None:
    """With a hint, and nothing has been written."""
    with pytest.raises(error, match=said) as caught:
        imported(tmp_path / "out", *sources, **options)
    assert not (tmp_path / "out").exists()
    assert caught.value.hint


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path, DataError, "neither config.json nor the .index", tmp_path / "empty")
    refused(tmp_path, DataError, "does not exist", tmp_path / "absent.index")
    refused(tmp_path, DataError, "vocab.txt is no model", RELEASED / "vocab.txt")
    make_run(tmp_path / "run")
    refused(tmp_path, ConfigError, "discern finetune", tmp_path / "run")
    imported(tmp_path / "ours", RELEASED)
    refused(tmp_path, ConfigError, "discern finetune", tmp_path / "ours")
    refused(tmp_path, ConfigError, "3 sources", RELEASED, RELEASED, RELEASED)


def test_sources_that_are_not_one_model_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "d", tmp_path / "g"
    saved(one, "ElectraForPreTraining")
    small(other, tokenizer="wordpiece, cased")
    refused(tmp_path, ConfigError, "--heads", one, heads=4)
    refused(tmp_path, ConfigError, "contains the discriminator, .* the discriminator", one, one)
    refused(tmp_path, DataError, "different vocabularies", one, other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"num_hidden_layers": 1}, r"unexpected tensor 'electra\.encoder\.layer\.1"),
        ({"num_hidden_layers": 3}, r"'electra\.encoder\.layer\.2.* is missing, and 15 more"),
        *(({"num_hidden_layers": value}, "layer") for value in (10**9, -1, 0, 1.5, float("nan"), "12", True)),
        *((XLNET_SIZES | {"model_type": "xlnet", "n_head": value}, "config.json") for value in (10**9, 0, [2])),
    ],
)
def test_a_config_of_another_model_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved(tmp_path / "d", "ElectraForPreTraining")
    path = tmp_path / "d" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(tmp_path, CheckpointError, said, tmp_path / "d")


class Trap:
    """What a pickle can do to whoever opens it."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("sprung"),)


def test_weights_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small(tmp_path / "g")
    path = tmp_path / "g" / "model.safetensors"
    content, tensors, words = path.read_bytes(), load_file(path), "electra.embeddings.word_embeddings.weight"
    for name, value, error, said in (
        ("generator_lm_head.weight", tensors[words] + 1, CheckpointError, "differs from the word embeddings"),
        (words, tensors[words] * float("nan"), NumericsError, "not finite"),
    ):
        save_file(tensors | {name: value}, path, {"format": "pt"})
        refused(tmp_path, error, said, tmp_path / "g")
    path.write_bytes(content[:-9])
    refused(tmp_path, CheckpointError, "damaged", tmp_path / "g")
    path.unlink()
    torch.save({"weight": Trap()}, tmp_path / "g" / "pytorch_model.bin")
    refused(tmp_path, CheckpointError, "possibly code", tmp_path / "g")
    assert not Path("sprung").exists()


def test_a_model_needs_its_tokenizer(tmp_path: Path) -> None:
    source = shutil.copytree(RELEASED, tmp_path / "tf")
    words = (source / "vocab.txt").rename(tmp_path / "vocab.txt")
    refused(tmp_path, DataError, "tokenizer", source)
    imported(tmp_path / "given", source, tokenizer=words)
    words.write_text(words.read_text() + "more\n")
    refused(tmp_path, DataError, "47 entries", source, tokenizer=words)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_source_gives_the_same_bytes_and_is_exported_again(tmp_path: Path) -> None:
    out, options = tmp_path / "ours", cast(Any, {"progress": Silent(), "warn": pytest.fail})
    imported(out, RELEASED)
    before = files_in(out)
    imported(out, RELEASED)
    assert files_in(out) == before
    assert not any(str(tmp_path).encode() in content for content in before.values())
    export(out, out=tmp_path / "all", all_networks=True, **options)
    after = files_in(tmp_path / "all")
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == {"README.md"}
    done = export(out, out=tmp_path / "g", network="generator", precision="bfloat16", **options)
    assert (done.networks, done.loads_as, done.step) == (("generator",), "ElectraForMaskedLM", 7)
    assert "discern.toml" not in files_in(tmp_path / "g")
    card = (tmp_path / "g" / "README.md").read_text()
    assert "| Weights stored as | bfloat16 |" in card
    assert "> # ours" in card, "the card that came with it is kept"
    assert card.count("license:") == 1
