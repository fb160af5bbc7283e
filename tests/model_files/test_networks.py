"""Networks in the format of transformers: what we write is loaded there, and what is written there is read here."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from discern.data.tokenizer import load_tokenizer
from discern.errors import CheckpointError, ConfigError, DiscernError, NumericsError
from discern.model_files.huggingface import PRECISIONS, HuggingFaceFolder, StoredNetwork, network_to_huggingface, read_network
from discern.models.base import Network, load_networks, named_parameters
from discern.models.config import ModelConfig
from discern.models.heads import ReplacedTokenHead
from discern.storage.checksums import record_checksums
from tests.parity import small_xlnet
from tests.parity.small_networks import VOCABULARY, build, inputs, make_noisy, sizes, token_batch

CONFIG, WEIGHTS, HEAD, PICKLE = "config.json", "model.safetensors", "discern_head.safetensors", "pytorch_model.bin"
INDEX = f"{WEIGHTS}.index.json"
BATCH = token_batch([17, 12, 5], 19, second=[6, 4, 3])
GIVEN = BATCH.input_ids, BATCH.attention_mask, BATCH.token_type_ids
REAL = BATCH.attention_mask  # what a network gives at padding means nothing


def modern(**changes: Any) -> ModelConfig:
    return sizes(**{"encoder": "modernbert", "embedding_size": 32, "num_layers": 4, "local_window": 8, **changes})


def deberta(**changes: Any) -> ModelConfig:
    return sizes(**{"encoder": "deberta", "embedding_size": 32, "position_buckets": 8, **changes})


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found[REAL], expected[REAL], atol=1e-5, rtol=1e-5)


def judge(model: ModelConfig, **settings: Any) -> Network:
    return build(model, **settings).networks()["discriminator"]


def writer(model: ModelConfig, name: str = "rtd", **settings: Any) -> Network:
    """The network of an objective that predicts words."""
    return list(build(model, name, **settings).networks().values())[-1]


DISENTANGLED, BILINEAR, APART = {"tying": "gradient-disentangled"}, {"discriminator_head": "bilinear"}, {"tying": "none"}
BIASES = dict.fromkeys(("attention_bias", "feedforward_bias", "norm_bias", "classifier_bias"), True)
OTHER_LAYERS = BIASES | {"full_attention_every": 2, "full_rope_theta": 900.0, "local_rope_theta": 500.0}
XLNET = small_xlnet.build_network(small_xlnet.sizes(clamp_length=7, activation="gelu-tanh"))
NETWORKS: dict[str, tuple[str, Network]] = {
    "discriminator": ("ElectraForPreTraining", judge(sizes(hidden_dropout=0.25, num_token_types=3))),
    "discriminator of one width": ("ElectraForPreTraining", judge(sizes(embedding_size=32))),
    "gradient-disentangled": ("ElectraForPreTraining", judge(sizes(), **DISENTANGLED)),
    "energies": ("ElectraForPreTraining", judge(sizes(), name="electric")),
    "bilinear head": ("ElectraModel", judge(sizes(), **DISENTANGLED, **BILINEAR)),
    "encoder": ("ElectraModel", Network(judge(sizes()).encoder, nn.Identity())),
    "generator": ("ElectraForMaskedLM", writer(sizes(), generator_size=0.5)),
    "generator as wide as its embeddings": ("ElectraForMaskedLM", writer(sizes(hidden_size=64))),
    "generator with embeddings of its own": ("ElectraForMaskedLM", writer(sizes(), **APART)),
    "mlm": ("ElectraForMaskedLM", writer(sizes(num_layers=11), "mlm")),
    "copying head": ("ElectraForMaskedLM", writer(sizes(), "all-tokens-mlm")),
    "two towers": ("DiscernTwoTowerForMaskedLM", writer(sizes(), "electric")),
    "ModernBERT discriminator": ("ModernBertForTokenClassification", judge(modern(**OTHER_LAYERS))),
    "ModernBERT gradient-disentangled": ("ModernBertForTokenClassification", judge(modern(), **DISENTANGLED)),
    "ModernBERT energies": ("ModernBertForTokenClassification", judge(modern(), name="electric")),
    "ModernBERT bilinear head": ("ModernBertModel", judge(modern(), **BILINEAR)),
    "ModernBERT generator": ("ModernBertForMaskedLM", writer(modern(), generator_size=1.0)),
    "ModernBERT projected word table": ("ModernBertForMaskedLM", writer(modern(), generator_size=0.5)),
    "ModernBERT mlm": ("ModernBertForMaskedLM", writer(modern(**OTHER_LAYERS), "mlm")),
    "ModernBERT copying head": ("ModernBertForMaskedLM", writer(modern(), "all-tokens-mlm")),
    "DeBERTa discriminator": ("DebertaV2Model", judge(deberta(share_att_key=False, num_token_types=3))),
    "DeBERTa gradient-disentangled": ("DebertaV2Model", judge(deberta(conv_kernel_size=3), **DISENTANGLED)),
    "DeBERTa energies": ("DebertaV2Model", judge(deberta(position_buckets=0), name="electric")),
    "DeBERTa bilinear head": ("DebertaV2Model", judge(deberta(), **BILINEAR)),
    "DeBERTa generator": ("DebertaV2ForMaskedLM", writer(deberta(pos_att_type="p2c"), generator_size=1.0)),
    "DeBERTa mlm": ("DebertaV2ForMaskedLM", writer(deberta(position_biased_input=True), "mlm")),
    "DeBERTa copying head": ("DebertaV2ForMaskedLM", writer(deberta(), "all-tokens-mlm")),
    "XLNet": ("XLNetLMHeadModel", XLNET),
    "XLNet encoder": ("XLNetModel", Network(XLNET.encoder, nn.Identity())),
}


def write(folder: Path, network: Network, precision: str = "float32") -> dict[str, bytes]:
    folder.mkdir()
    network_to_huggingface(network, VOCABULARY.special, precision).write(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def outputs(model: Any) -> Tensor:
    """What a model of transformers gives first: logits of its head, or hidden states."""
    given = inputs(BATCH)
    if model.config.model_type == "modernbert":
        del given["token_type_ids"]
    found: Tensor = model.float().eval()(**given)[0]
    return found.squeeze(-1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", NETWORKS)
@torch.no_grad()
def test_what_is_written_is_the_same_in_transformers_and_here(case: str, precision: str, tmp_path: Path) -> None:
    loads_as, network = NETWORKS[case]
    files, dtype = write(tmp_path / "out", network, precision), PRECISIONS[precision]
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    for name in files.keys() & {WEIGHTS, HEAD}:
        assert {tensor.dtype for tensor in load_file(tmp_path / "out" / name).values()} == {dtype}

    again = read_network(tmp_path / "out").with_head()
    before, after = named_parameters(network), named_parameters(again)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value.to(dtype).float()), name
    assert type(again.head) is type(network.head)
    assert not any(part.training for each in again.parts() for part in each.modules())
    model = network_to_huggingface(again, VOCABULARY.special, precision)
    assert model.num_parameters == sum(map(Tensor.numel, before.values()))
    if precision == "float32":
        close(again.token_logits(*GIVEN), network.token_logits(*GIVEN))
    elif model.factors:
        return  # the product of rounded factors is not their rounded product
    assert write(tmp_path / "again", again, precision) == files

    assert model.loads_as == loads_as
    if case == "two towers":
        with pytest.raises(ValueError, match="discern-two-tower"):
            transformers.AutoModel.from_pretrained(tmp_path / "out")
        return
    theirs, info = getattr(transformers, loads_as).from_pretrained(tmp_path / "out", output_loading_info=True)
    # transformers has no class for the head of DeBERTa's discriminator, which has the names of the released code.
    headless = {name for name in info["unexpected_keys"] if name.startswith("mask_predictions.")}
    info["unexpected_keys"] = set(info["unexpected_keys"]) - headless
    assert not any(info.values()), info
    assert theirs.get_input_embeddings().weight.dtype == dtype
    if network.bilinear is None and not headless:
        close(outputs(theirs), again.token_logits(*GIVEN))
    bare, info = transformers.AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    close(outputs(bare), again.encoder(*GIVEN))


@pytest.mark.parametrize("case", ["discriminator", "ModernBERT discriminator", "DeBERTa generator", "XLNet"])
def test_every_setting_is_stated_and_read(case: str, tmp_path: Path) -> None:
    """So that another version's default changes nothing; what only decoders and other heads have may be left out."""
    loads_as, network = NETWORKS[case]
    stated = json.loads(write(tmp_path / "out", network)[CONFIG])
    others = "use_cache is_decoder add_cross_attention bos_token_id eos_token_id classifier_dropout model_type "
    others += "start_n_top end_n_top deterministic_flash_attn sparse_pred_ignore_index sparse_prediction"
    assert getattr(transformers, loads_as).config_class.__annotations__.keys() - stated.keys() <= set(others.split())
    read = read_network(tmp_path / "out").network.encoder.config.model_dump()
    differ = {key for key, value in network.encoder.config.model_dump().items() if read[key] != value}
    assert differ <= {"max_positions"}
    if case == "ModernBERT discriminator":
        # Servers read the older keys, and want a number for every token.
        assert [stated[key] for key in ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")] == [2, 900, 500]
        assert [stated[f"{role}_token_id"] for role in ("pad", "cls", "sep", "bos", "eos")] == [0, 2, 3, 2, 3]
        assert stated["id2label"] == {"0": "replaced"}


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (judge(sizes(normalization="pre")), "normalization"),
        (writer(modern(), "electric"), "two towers of encoder 'modernbert'"),
        (judge(modern(embedding_size=16), **BILINEAR), "bilinear term reads words of width 16"),
        (Network(XLNET.encoder, ReplacedTokenHead(XLNET.encoder.config)), "replaced"),
    ],
)
def test_a_network_without_a_form_is_refused(network: Network, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        network_to_huggingface(network, VOCABULARY.special)


@pytest.mark.parametrize("tying", ["embeddings", "token", "none", "gradient-disentangled"])
@torch.no_grad()
def test_weights_go_back_into_any_way_of_sharing(tying: str, tmp_path: Path) -> None:
    source, target = (build(sizes(), seed=seed, tying=tying, **BILINEAR).networks() for seed in (0, 1))
    values = {}
    for name, network in source.items():
        write(tmp_path / name, network)
        values[name] = named_parameters(read_network(tmp_path / name).network)
    assert load_networks(target, values) is None
    for name, network in source.items():
        close(target[name].token_logits(*GIVEN), network.token_logits(*GIVEN))
    other = build(sizes(), seed=2, **DISENTANGLED, **BILINEAR).networks()
    lost = "discriminator", "encoder.embeddings.position.weight"  # which it shares with a generator that has others
    assert load_networks(other, {"discriminator": values["discriminator"]}) == lost


# Somebody else's models

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LAYERS = SIZES | {"max_position_embeddings": 40, "hidden_dropout_prob": 0.2}
TOKENS = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
KINDS: dict[str, dict[str, Any]] = {
    "Electra": LAYERS | {"embedding_size": 16},
    "Bert": LAYERS,
    "ModernBert": SIZES | TOKENS | {"num_hidden_layers": 4, "local_attention": 8, "embedding_dropout": 0.2},
    "XLNet": {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64, "dropout": 0.2},
}


def saved(folder: Path, architecture: str, **changes: Any) -> Any:
    """A model that transformers wrote, every parameter far from its default."""
    kind = architecture.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
    config = getattr(transformers, f"{kind}Config")(vocab_size=97, **(KINDS[kind] | changes))
    model = getattr(transformers, architecture)(config)
    make_noisy(model)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def edit(folder: Path, changes: Mapping[str, Any]) -> None:
    """Change config.json. A key whose value is "absent" is removed."""
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@torch.no_grad()
def check(folder: Path, model: Any) -> StoredNetwork:
    """The network of a folder, which computes the same as the model, and is ready to be trained."""
    stored = read_network(folder)
    encoder = stored.network.encoder
    close(encoder(*GIVEN), outputs(getattr(model, model.base_model_prefix, model)))
    if stored.network.predicts != "nothing":
        close(stored.with_head().token_logits(*GIVEN), outputs(model))
    assert encoder.config.hidden_dropout == 0.2
    assert {(value.dtype, value.requires_grad) for value in encoder.parameters()} == {(torch.float32, True)}
    return stored


@pytest.mark.parametrize(
    ("architecture", "changes", "predicts"),
    [
        ("ElectraModel", {"embedding_size": 32}, "nothing"),
        ("ElectraForPreTraining", {}, "replaced"),
        ("ElectraForMaskedLM", {}, "words"),
        ("ElectraForSequenceClassification", {}, "nothing"),
        ("ElectraForQuestionAnswering", {}, "nothing"),
        ("BertModel", {}, "nothing"),
        ("BertForMaskedLM", {}, "words"),
        ("BertForPreTraining", {}, "words"),
        ("BertForTokenClassification", {}, "nothing"),
        ("ModernBertModel", {}, "nothing"),
        ("ModernBertForMaskedLM", {}, "words"),
        ("ModernBertForMaskedLM", {"decoder_bias": False}, "words"),
        ("ModernBertForTokenClassification", {}, "nothing"),
        # A classifier whose label is called like the output of a discriminator
        ("ModernBertForSequenceClassification", {"id2label": {0: "energy"}, "problem_type": "regression"}, "nothing"),
        ("XLNetModel", {}, "nothing"),
        ("XLNetLMHeadModel", {}, "words"),
        ("XLNetForSequenceClassification", {}, "nothing"),
    ],
)
def test_what_transformers_writes_is_read(architecture: str, changes: dict[str, Any], predicts: str, tmp_path: Path) -> None:
    model = saved(tmp_path, architecture, **changes)
    assert check(tmp_path, model).network.predicts == predicts


def shards(folder: Path, model: Any) -> None:
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="10KB")
    assert (folder / INDEX).exists()


def pickled(rename: Callable[[str], str] = str, parts: int = 1, **around: Any) -> Callable[[Path, Any], None]:
    """Writes the weights as pickles, under other names."""

    def change(folder: Path, model: Any) -> None:
        (folder / WEIGHTS).unlink()
        tensors = {rename(name): tensor for name, tensor in model.state_dict().items()}
        tensors["bert.embeddings.position_ids"] = torch.arange(40)[None]
        files = {name: f"{number % parts}-{PICKLE}" if parts > 1 else PICKLE for number, name in enumerate(tensors)}
        for file in set(files.values()):
            held = {name: tensor for name, tensor in tensors.items() if files[name] == file}
            torch.save({"state_dict": held, **around} if around else held, folder / file)
        if parts > 1:
            (folder / f"{PICKLE}.index.json").write_text(json.dumps({"weight_map": files}))

    return change


@pytest.mark.parametrize(
    "change",
    [
        shards,
        pickled(),
        pickled(parts=2),
        pickled("module.{}".format, epoch=3, optimizer={"lr": 0.1}),
        pickled("module._orig_mod.{}".format),
        pickled(lambda name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")),
        *(lambda folder, model, dtype=dtype: model.to(dtype).save_pretrained(folder) for dtype in (torch.bfloat16, torch.half)),
    ],
)
def test_every_format_of_weights_is_read(change: Callable[[Path, Any], None], tmp_path: Path) -> None:
    model = saved(tmp_path, "BertForPreTraining")
    change(tmp_path, model)
    assert check(tmp_path, model).network.predicts == "words"


OLDER = {"layer_types": "absent", "rope_parameters": "absent"}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("ModernBertForMaskedLM", OLDER),
        ("ModernBertForMaskedLM", OLDER | {"global_attn_every_n_layers": 2, "global_rope_theta": 70.0, "local_rope_theta": 9.0}),
        ("ModernBertForMaskedLM", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("ModernBertForMaskedLM", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 90.0}}}),
        *(("XLNetLMHeadModel", {"ff_activation": name}) for name in ("gelu_new", "relu", "silu", "swish", "gelu_pytorch_tanh")),
        *(("XLNetLMHeadModel", {"clamp_len": length, "d_head": "absent"}) for length in (0, 5)),
    ],
)
def test_a_setting_means_what_it_means_in_transformers(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = saved(tmp_path, architecture)
    edit(tmp_path, changes)
    check(tmp_path, type(model).from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "changes", "settings"),
    [
        # One base for all layers, and no limit
        ("ModernBertModel", OLDER | {"global_rope_theta": 700.0, "local_rope_theta": None}, {"local_rope_theta": 700.0}),
        ("XLNetModel", {"clamp_len": None}, {"clamp_length": 0}),
    ],
)
def test_a_setting_that_is_null(architecture: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path, architecture)
    edit(tmp_path, changes)
    assert settings.items() <= read_network(tmp_path).network.encoder.config.model_dump().items()


@pytest.mark.parametrize("stated", [None, 10**12, 1024])
def test_rows_of_a_model_without_positions_are_as_long_as_it_says_or_usual(stated: int | None, tmp_path: Path) -> None:
    saved(tmp_path, "XLNetModel")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
    assert HuggingFaceFolder(tmp_path).max_length == (stated if stated == 1024 else 512)


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        *(
            ("BertModel", {key: value}, f"{key}|damaged")
            for key, value in {
                "model_type": "roberta",
                "hidden_act": "gelu_new",
                "position_embedding_type": "relative_key",
                "is_decoder": True,
                "add_cross_attention": True,
                "vocab_size": None,
                "hidden_size": 10**9,
                "max_position_embeddings": float("inf"),
                "num_hidden_layers": "\x1b[2J",
            }.items()
        ),
        ("BertModel", {"num_attention_heads": 5}, "not a multiple"),
        ("BertModel", {"num_hidden_layers": 2000}, "less than or equal to 1024"),
        ("BertModel", {"vocab_size": 10**12}, "vocab_size"),
        # Before memory is allocated
        ("BertModel", {"vocab_size": 10**9}, r"has shape \[97, 32\], but the network expects \[1000000000, 32\]"),
        ("BertModel", {"intermediate_size": 1_000_000}, r"has shape \[48, 32\], but the network expects \[1000000, 32\]"),
        ("BertModel", {"vocab_size": 98}, r"has shape \[97, 32\], but the network expects \[98, 32\]"),
        *(
            ("ModernBertForMaskedLM", {key: value}, key)
            for key, value in {
                "rope_scaling": {"type": "linear", "factor": 2},
                "layer_types": ["sliding_attention"] * 4,
                "hidden_activation": "silu",
                "tie_word_embeddings": False,
                "hidden_size": "wide",
            }.items()
        ),
        *(
            ("ModernBertForMaskedLM", {"rope_parameters": value}, "rope_parameters|damaged")
            for value in (
                {"rope_type": "default"},
                {"full_attention": {"type": "yarn"}},
                {"full_attention": {"partial_rotary_factor": 0.5}},
            )
        ),
        ("ModernBertForMaskedLM", {"num_attention_heads": 32}, "cannot be rotated in pairs"),
        ("ModernBertForMaskedLM", {"intermediate_size": 20}, r"model\.layers\.0\.mlp\.Wi\.weight"),
        ("ModernBertForMaskedLM", {"num_hidden_layers": 5, "layer_types": None}, r"'model\.layers\.4\..* is missing"),
        ("ModernBertForMaskedLM", {"num_hidden_layers": 3, "layer_types": None}, r"unexpected tensor 'model\.layers\.3"),
        *(
            ("XLNetLMHeadModel", {key: value}, f"{key}|damaged")
            for key, value in {
                "attn_type": "uni",
                "untie_r": False,
                "same_length": True,
                "ff_activation": "gelu_fast",
                "clamp_len": "far",
                "d_head": 3,
                "n_layer": "two",
            }.items()
        ),
        ("XLNetLMHeadModel", {"n_layer": 2}, "unexpected tensor"),
        ("XLNetLMHeadModel", {"n_layer": 4}, "is missing"),
        ("XLNetLMHeadModel", {"d_inner": 65}, "shape"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(architecture: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved(tmp_path, architecture)
    edit(tmp_path, changes)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_network(tmp_path)
    assert caught.value.hint


BIAS = "bert.encoder.layer.1.output.dense.bias"


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (BIAS, None, f"'{BIAS}' is missing".replace("bert", "(bert|electra)")),
        (BIAS, torch.zeros(31), rf"'{BIAS}' has shape \[31\], but the network expects \[32\]"),
        (BIAS, torch.zeros(32, dtype=torch.int8), f"'{BIAS}' has data type int8"),
        (BIAS, torch.full((32,), torch.nan), f"'{BIAS}' .*not finite"),
        ("bert.embeddings_project.bias", torch.zeros(32), r"unexpected tensor 'bert\.embeddings_project\.bias'"),
    ],
)
def test_a_wrong_tensor_is_named(name: str, tensor: Tensor | None, said: str, tmp_path: Path) -> None:
    saved(tmp_path, "BertForMaskedLM")
    tensors = load_file(tmp_path / WEIGHTS)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, tmp_path / WEIGHTS)
    with pytest.raises((CheckpointError, NumericsError), match=said):
        read_network(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("ElectraForMaskedLM", "generator_lm_head.weight"),
        ("BertForMaskedLM", "cls.predictions.decoder.weight"),
        ("ModernBertForMaskedLM", "decoder.weight"),
        ("XLNetLMHeadModel", "lm_loss.weight"),
    ],
)
def test_of_a_model_with_an_output_matrix_of_its_own_only_the_encoder_is_read(
    architecture: str, name: str, tmp_path: Path
) -> None:
    model = saved(tmp_path, architecture)
    words = model.get_input_embeddings().weight.detach()
    tensors = load_file(tmp_path / WEIGHTS)
    save_file(tensors | {name: words.clone()}, tmp_path / WEIGHTS)
    check(tmp_path, model)
    save_file(tensors | {name: words + 1}, tmp_path / WEIGHTS)
    stored = read_network(tmp_path)
    with torch.no_grad():
        close(stored.network.encoder(*GIVEN), outputs(model.base_model))
    with pytest.raises(CheckpointError, match=f"'{name}' differs from the word embeddings"):
        stored.with_head()


def content(value: object) -> bytes:
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (CONFIG, None, r"config\.json is missing"),
        (CONFIG, b"{", r"config\.json is damaged"),
        *((name, POINTER, f"{name} is a Git LFS pointer") for name in (CONFIG, WEIGHTS, "tokenizer.json")),
        (WEIGHTS, b"\x08" + bytes(50), rf"{WEIGHTS} is damaged"),
        (WEIGHTS, None, f"has no {WEIGHTS}"),
        *((PICKLE, data, "cannot be loaded") for data in (b"", b"not a pickle", content({})[:-3], b"PK\x03\x04" + bytes(50))),
        *((PICKLE, content(each), "something other than") for each in ([], {"weights": {"a": torch.zeros(2)}})),
        (PICKLE, content({}), "is missing, and"),
        *((INDEX, data, "(is damaged|cannot be read)") for data in (b"{", b"[]", b"{}", b'{"weight_map": {"a": 1}}')),
        *((INDEX, b'{"weight_map": {"a": "%s"}}' % name, "has no such file") for name in (b"b", b"../model/config.json")),
        (f"{PICKLE}.index.json", b'{"weight_map": {"a": "b.bin"}}', "has no such file"),
        *((f"{name}-00001-of-00002.{end}", b"", "has no") for name, end in (("model", "safetensors"), ("pytorch_model", "bin"))),
    ],
)
def test_damaged_and_missing_files_are_named(name: str, data: bytes | None, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    saved(folder, "ElectraForPreTraining")
    if "model" in name:
        (folder / WEIGHTS).unlink()
    if data is not None:
        (folder / name).write_bytes(data)
    elif name == CONFIG:
        (folder / name).unlink()
    with pytest.raises(DiscernError, match=said) as caught:
        load_tokenizer(folder) if name == "tokenizer.json" else read_network(folder)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (WEIGHTS, lambda data: data[:-1] + b"?", "checksum"),
        (HEAD, lambda data: data[:-1] + b"?", "checksum"),
        (HEAD, None, f"{HEAD} is missing"),
    ],
)
def test_what_we_wrote_is_checked(name: str, change: Callable[[bytes], bytes] | None, said: str, tmp_path: Path) -> None:
    data = write(tmp_path / "out", NETWORKS["bilinear head"][1])[name]
    path = tmp_path / "out" / name
    record_checksums(path.parent, [CONFIG, WEIGHTS, HEAD])
    path.unlink() if change is None else path.write_bytes(change(data))
    with pytest.raises(CheckpointError, match=said):
        read_network(tmp_path / "out")
