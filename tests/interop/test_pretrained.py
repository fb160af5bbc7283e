"""The encoder of any Hugging Face ELECTRA or BERT: the same states as transformers gives, from every form of folder."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from discern.data.tokenizer import load_tokenizer
from discern.errors import CheckpointError, DiscernError
from discern.interop.huggingface import to_huggingface
from discern.interop.pretrained import encoder_from_huggingface
from discern.models.electra.encoder import BertEncoder
from tests.parity.small_networks import VOCABULARY, build, inputs, make_noisy, sizes, token_batch

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY.size,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "layer_norm_eps": 1e-6,
}
BATCH = token_batch([17, 12, 5], 19, second=[6, 4, 3])
REAL = BATCH.attention_mask


def electra(architecture: str = "ElectraModel", **changes: Any) -> Any:
    """Somebody else's ELECTRA, tiny, in evaluation mode."""
    return noisy(architecture, transformers.ElectraConfig(**{**SIZES, "embedding_size": 16, **changes}))


def bert(architecture: str = "BertModel", **changes: Any) -> Any:
    """Somebody else's BERT, tiny, in evaluation mode."""
    return noisy(architecture, transformers.BertConfig(**{**SIZES, **changes}))


def noisy(architecture: str, config: Any) -> Any:
    model = getattr(transformers, architecture)(config)
    make_noisy(model)
    return model.eval()


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def as_pickle(folder: Path, content: object) -> Path:
    """The folder with its weights as pytorch_model.bin alone."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def edited(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@torch.no_grad()
def assert_same_states(encoder: BertEncoder, model: Any) -> None:
    expected = getattr(model, model.base_model_prefix, model)(**inputs(BATCH)).last_hidden_state
    states = encoder(BATCH.input_ids, BATCH.attention_mask, BATCH.token_type_ids)
    torch.testing.assert_close(states[REAL], expected[REAL], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "architecture",
    [
        "ElectraModel",
        "ElectraForPreTraining",
        "ElectraForMaskedLM",
        "ElectraForSequenceClassification",
        "ElectraForQuestionAnswering",
    ],
)
def test_an_electra_with_any_head(architecture: str, tmp_path: Path) -> None:
    model = electra(architecture)
    assert_same_states(encoder_from_huggingface(saved(model, tmp_path)), model)


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForTokenClassification"])
def test_a_bert_with_any_head(architecture: str, tmp_path: Path) -> None:
    model = bert(architecture)
    encoder = encoder_from_huggingface(saved(model, tmp_path))
    assert encoder.projection is None
    assert_same_states(encoder, model)


def test_embeddings_as_wide_as_the_states_have_no_projection(tmp_path: Path) -> None:
    model = electra(embedding_size=32)
    assert_same_states(encoder_from_huggingface(saved(model, tmp_path)), model)


def test_it_is_ready_to_be_trained(tmp_path: Path) -> None:
    encoder = encoder_from_huggingface(saved(bert(hidden_dropout_prob=0.2), tmp_path))
    assert not any(part.training for part in encoder.modules())
    assert {(value.dtype, value.device.type, value.requires_grad) for value in encoder.parameters()} == {
        (torch.float32, "cpu", True)
    }
    assert encoder.config.hidden_dropout == encoder.embeddings.dropout.probability == 0.2
    encoder(BATCH.input_ids, BATCH.attention_mask, BATCH.token_type_ids).square().sum().backward()
    assert all(value.grad is not None for value in encoder.parameters())


def test_an_export_of_ours_with_a_head_beside(tmp_path: Path) -> None:
    network = build(sizes(), tying="gradient-disentangled", discriminator_head="bilinear").networks()["discriminator"]
    to_huggingface(network, VOCABULARY).write(tmp_path)
    with torch.no_grad():
        expected = network.encoder(BATCH.input_ids, BATCH.attention_mask, BATCH.token_type_ids)
        states = encoder_from_huggingface(tmp_path)(BATCH.input_ids, BATCH.attention_mask, BATCH.token_type_ids)
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model", [electra("ElectraForPreTraining"), bert("BertForPreTraining")], ids=["electra", "bert"])
def test_a_pickle_of_tensors(model: Any, tmp_path: Path) -> None:
    assert_same_states(encoder_from_huggingface(as_pickle(saved(model, tmp_path), model.state_dict())), model)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_checkpoint_of_parallel_or_compiled_training(prefix: str, tmp_path: Path) -> None:
    model = electra("ElectraForPreTraining")
    tensors = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    content = {"state_dict": tensors, "epoch": 3, "optimizer": {"lr": 0.1}}
    assert_same_states(encoder_from_huggingface(as_pickle(saved(model, tmp_path), content)), model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    saved(electra("ElectraForPreTraining"), tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(DiscernError, match=rf"{name} is a Git LFS pointer") as caught:
        load_tokenizer(tmp_path) if name == "tokenizer.json" else encoder_from_huggingface(tmp_path)
    assert "git lfs pull" in str(caught.value.hint)


def test_the_names_of_early_conversions(tmp_path: Path) -> None:
    model = bert("BertForPreTraining")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in model.state_dict().items()
    }
    assert "bert.embeddings.LayerNorm.gamma" in old
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    assert_same_states(encoder_from_huggingface(as_pickle(saved(model, tmp_path), old)), model)


def test_weights_in_several_files(tmp_path: Path) -> None:
    model = electra("ElectraForPreTraining")
    saved(model, tmp_path, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert_same_states(encoder_from_huggingface(tmp_path), model)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"index\.json names '{shards[1].name}', but .* has no such file"):
        encoder_from_huggingface(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for content in ("{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=r"index\.json (is damaged|cannot be read)"):
            encoder_from_huggingface(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": f"../{tmp_path.name}/{shards[0].name}"}}))
    with pytest.raises(CheckpointError, match="has no such file"):
        encoder_from_huggingface(tmp_path)


def test_a_pickle_in_several_files(tmp_path: Path) -> None:
    model = bert()
    (saved(model, tmp_path) / "model.safetensors").unlink()
    names = list(model.state_dict())
    files = {name: f"pytorch_model-0000{1 + place % 2}-of-00002.bin" for place, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: model.state_dict()[name] for name in names if files[name] == file}, tmp_path / file)
    with pytest.raises(
        CheckpointError, match=r"in several files \(pytorch_model-00001-of-00002\.bin, and 1 more\), but no"
    ) as caught:
        encoder_from_huggingface(tmp_path)
    assert "download pytorch_model.bin.index.json too" in str(caught.value.hint)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert_same_states(encoder_from_huggingface(tmp_path), model)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"bin\.index\.json names 'pytorch_model-00002-of-00002\.bin', but"):
        encoder_from_huggingface(tmp_path)


def test_parts_without_their_index_are_refused(tmp_path: Path) -> None:
    saved(bert(), tmp_path, max_shard_size="10KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"in several files \(model-00001-of-.*but no model\.safetensors\.index\.json"
    ) as caught:
        encoder_from_huggingface(tmp_path)
    assert "download model.safetensors.index.json too" in str(caught.value.hint)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_widened(dtype: torch.dtype, tmp_path: Path) -> None:
    model = bert().to(dtype)
    encoder = encoder_from_huggingface(saved(model, tmp_path))
    assert {value.dtype for value in encoder.parameters()} == {torch.float32}
    assert_same_states(encoder, model.float())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta', expected 'electra' or 'bert'"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new', but only 'gelu' is supported"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"position_embedding_type": "relative_key_query"}, "position_embedding_type is 'relative_key_query'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"vocab_size": True}, "vocab_size is true"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, expected a whole number from 1 to 2,147,483,647"),
        ({"vocab_size": 10**9}, "describes 32,000,[0-9,]+ parameters, but the weights beside it have only"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; .*less than or equal to 1024"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2, expected a whole number from 1"),
        ({"num_hidden_layers": float("nan")}, "num_hidden_layers is nan, expected a whole number"),
        ({"num_hidden_layers": "\x1b[2J"}, "num_hidden_layers is '.*', expected a whole number"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000; "),
        ({"intermediate_size": 1_000_000}, "describes [0-9,]+ parameters, but the weights beside it have only"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings is inf; "),
        ({"num_hidden_layers": 3}, r"'encoder\.layer\.2\..*' is missing, and 15 more"),
        ({"num_hidden_layers": 1}, r"unexpected tensor 'encoder\.layer\.1\..*', and 15 more"),
        ({"vocab_size": 98}, r"'embeddings\.word_embeddings\.weight' has shape \[97, 32\], but the network expects \[98, 32\]"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        encoder_from_huggingface(edited(saved(bert(), tmp_path), changes))
    assert caught.value.hint


BIAS = "bert.encoder.layer.1.output.dense.bias"


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (BIAS, None, f"'{BIAS}' is missing"),
        (BIAS, torch.zeros(31), rf"'{BIAS}' has shape \[31\], but the network expects \[32\]"),
        (BIAS, torch.zeros(32, dtype=torch.int8), f"'{BIAS}' has data type int8: the model is quantized"),
        ("bert.embeddings_project.bias", torch.zeros(32), "unexpected tensor 'bert.embeddings_project.bias'"),
    ],
)
def test_a_wrong_tensor_is_named(name: str, tensor: Tensor | None, said: str, tmp_path: Path) -> None:
    path = saved(bert("BertForMaskedLM"), tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, path)
    with pytest.raises(CheckpointError, match=said):
        encoder_from_huggingface(tmp_path)


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        encoder_from_huggingface(tmp_path)
    weights = saved(electra(), tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        encoder_from_huggingface(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        encoder_from_huggingface(tmp_path)


class Trap:
    """What a hostile pickle holds: reading it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_cannot_run_code(tmp_path: Path) -> None:
    saved(electra(), tmp_path)
    as_pickle(tmp_path, {"weight": Trap(tmp_path / "sprung")})
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be loaded .*more than tensors") as caught:
        encoder_from_huggingface(tmp_path)
    assert not (tmp_path / "sprung").exists()
    assert "save_pretrained()" in str(caught.value.hint)


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"a": 1}, protocol=2)[:-3], b"PK\x03\x04" + bytes(50)])
def test_a_damaged_pickle_is_named(content: bytes, tmp_path: Path) -> None:
    as_pickle(saved(electra(), tmp_path), {})
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be loaded"):
        encoder_from_huggingface(tmp_path)


def test_a_pickle_of_something_else_is_named(tmp_path: Path) -> None:
    saved(electra(), tmp_path)
    for content in ([torch.zeros(2)], {"weights": {"a": torch.zeros(2)}}, {1: torch.zeros(2)}):
        with pytest.raises(CheckpointError, match="something other than a dictionary of tensors"):
            encoder_from_huggingface(as_pickle(tmp_path, content))
    with pytest.raises(CheckpointError, match=r"'embeddings\.LayerNorm\.bias' is missing, and 38 more"):
        encoder_from_huggingface(as_pickle(tmp_path, {}))
