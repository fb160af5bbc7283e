"""Names, shapes and files on the way to Hugging Face and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from discern.errors import CheckpointError, ConfigError
from discern.interop.huggingface import is_discriminator, load_huggingface_weights, network_from_huggingface, to_huggingface
from discern.interop.names import parameter_names
from discern.models.base import Encoder, Network
from discern.storage.checksums import CHECKSUMS_NAME
from tests.parity.small_networks import VOCABULARY, build, counterpart, inputs, network_logits, sizes, token_batch

NETWORKS: dict[str, Network] = {
    "discriminator": build(sizes(), generator_size=0.5).networks()["discriminator"],
    "discriminator of one width": build(sizes(embedding_size=32)).networks()["discriminator"],
    "generator": build(sizes(), generator_size=0.5).networks()["generator"],
    "generator as wide as its embeddings": build(sizes(hidden_size=64, embedding_size=16)).networks()["generator"],
    "generator with embeddings of its own": build(sizes(), tying="none").networks()["generator"],
    "generator with only words shared": build(sizes(), tying="token").networks()["generator"],
    "mlm": build(sizes(), "mlm").networks()["encoder"],
}
BATCH = token_batch([17, 12, 5], 19, second=[6, 4, 3])
REAL = BATCH.attention_mask  # what an encoder gives at padding means nothing


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Network:
    return NETWORKS[request.param]


def write(folder: Path, network: Network, precision: str = "float32") -> Path:
    """The files of a model, in a new or empty folder, without the checksums that discern adds to them."""
    folder.mkdir(exist_ok=True)
    to_huggingface(network, VOCABULARY, precision).write(folder)
    (folder / CHECKSUMS_NAME).unlink()
    return folder


def own_parameters(network: Network) -> dict[str, Tensor]:
    named = [*network.encoder.named_parameters(prefix="encoder"), *network.head.named_parameters(prefix="head")]
    return dict(named)


def test_the_map_is_a_bijection(network: Network) -> None:
    names = parameter_names(network)
    assert len(set(names.values())) == len(names)
    theirs = {name for name, _ in counterpart(network).named_parameters()}
    assert set(names.values()) == theirs, "something of theirs is left over or invented"
    ours = {id(value) for value in own_parameters(network).values()}
    assert ours == {id(own_parameters(network)[name]) for name in names}, "a parameter of ours has no name"


def test_values_survive_the_way_there_and_back(network: Network, tmp_path: Path) -> None:
    loaded = network_from_huggingface(write(tmp_path, network))
    before, after = own_parameters(network), own_parameters(loaded)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert not any(part.training for part in loaded.encoder.modules())
    with torch.no_grad():
        assert torch.equal(network_logits(loaded, BATCH)[REAL], network_logits(network, BATCH)[REAL])


@torch.no_grad()
def test_transformers_loads_the_folder_whole(network: Network, tmp_path: Path) -> None:
    import transformers

    write(tmp_path, network)
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, architecture).from_pretrained(tmp_path, output_loading_info=True)
    assert {key: list(value) for key, value in info.items() if value} == {}
    theirs, ours = model.eval()(**inputs(BATCH)).logits, network_logits(network, BATCH)
    torch.testing.assert_close(theirs[REAL], ours[REAL], atol=1e-5, rtol=1e-5)
    encoder, info = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert list(info["missing_keys"]) == []
    hidden = network.encoder(BATCH.input_ids, BATCH.attention_mask, BATCH.token_type_ids)
    torch.testing.assert_close(encoder.eval()(**inputs(BATCH)).last_hidden_state[REAL], hidden[REAL], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_what_transformers_saves_can_be_read(network: Network, tmp_path: Path) -> None:
    counterpart(network).save_pretrained(tmp_path)
    loaded = network_from_huggingface(tmp_path)
    torch.testing.assert_close(network_logits(loaded, BATCH)[REAL], network_logits(network, BATCH)[REAL])


def test_every_setting_of_an_encoder_is_stated() -> None:
    """So that another version's default changes nothing; what only decoders and other heads have may be left out."""
    from transformers import ElectraConfig

    others = {
        "use_cache",
        "is_decoder",
        "add_cross_attention",
        "bos_token_id",
        "eos_token_id",
        "classifier_dropout",
        "model_type",
    }
    stated = to_huggingface(NETWORKS["discriminator"], VOCABULARY).config
    assert {name for name in ElectraConfig.__annotations__ if name not in others} <= stated.keys()


def test_equal_weights_are_equal_bytes_without_time_or_place(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        path = write(tmp_path / name, NETWORKS["generator"]) / "model.safetensors"
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    with safe_open(path, framework="pt") as weights:
        assert weights.metadata() == {"format": "pt"}
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}  # noqa: SIM118


def test_the_weights_are_as_readable_as_any_file(tmp_path: Path) -> None:
    write(tmp_path, NETWORKS["generator"])
    (tmp_path / "other").touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_tells_a_discriminator(tmp_path: Path) -> None:
    assert is_discriminator(write(tmp_path / "discriminator", NETWORKS["discriminator"]))
    assert not is_discriminator(write(tmp_path / "generator", NETWORKS["generator"]))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@torch.no_grad()
def test_sixteen_bits(network: Network, precision: str, tmp_path: Path) -> None:
    """WeightFiles as rounded, read as float32; transformers reads the same values, in the type that the folder states."""
    import transformers

    write(tmp_path, network, precision)
    dtype, rounded = getattr(torch, precision), {"bfloat16": 2**-8, "float16": 2**-11}[precision]
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {dtype}
    loaded = network_from_huggingface(tmp_path)
    before, after = own_parameters(network), own_parameters(loaded)
    for name, value in before.items():
        assert after[name].dtype == torch.float32
        torch.testing.assert_close(after[name], value.to(dtype).float(), rtol=0, atol=0)
        torch.testing.assert_close(after[name], value, rtol=rounded, atol=1e-6)
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    theirs = getattr(transformers, architecture).from_pretrained(tmp_path)
    assert theirs.dtype == dtype
    logits = theirs.float().eval()(**inputs(BATCH)).logits
    torch.testing.assert_close(logits[REAL], network_logits(loaded, BATCH)[REAL], atol=1e-5, rtol=1e-5)


def test_what_is_no_pre_training_model_is_named(tmp_path: Path) -> None:
    from transformers import ElectraModel

    ElectraModel(counterpart(NETWORKS["discriminator"]).config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no pre-training head: it is a bare encoder or a fine-tuned model"):
        network_from_huggingface(tmp_path)


def changed(folder: Path, name: str, tensor: Tensor | None) -> Path:
    """The folder with one tensor replaced, added or (None) removed."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, path)
    return folder


BIAS = "electra.encoder.layer.1.output.dense.bias"


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (BIAS, None, f"'{BIAS}' is missing"),
        (BIAS, torch.zeros(31), rf"'{BIAS}' has shape \[31\], but the network expects \[32\]"),
        ("classifier.dense.weight", torch.zeros(2, 2), "unexpected tensor 'classifier.dense.weight'"),
    ],
)
def test_a_wrong_tensor_is_named(name: str, tensor: Tensor | None, said: str, tmp_path: Path) -> None:
    changed(write(tmp_path, NETWORKS["discriminator"]), name, tensor)
    with pytest.raises(CheckpointError, match=said):
        network_from_huggingface(tmp_path)


def test_the_buffers_of_older_versions_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, NETWORKS["generator"])
    changed(tmp_path, "electra.embeddings.position_ids", torch.arange(40)[None])
    table = load_file(tmp_path / "model.safetensors")["electra.embeddings.word_embeddings.weight"]
    load_huggingface_weights(NETWORKS["generator"], changed(tmp_path, "generator_lm_head.weight", table.clone()))


def test_an_untied_output_matrix_is_refused(tmp_path: Path) -> None:
    changed(write(tmp_path, NETWORKS["generator"]), "generator_lm_head.weight", torch.zeros(97, 16))
    with pytest.raises(CheckpointError, match="differs from the word embeddings"):
        network_from_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "bert"}, "model_type is 'bert', expected 'electra'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 3}, r"'electra.encoder.layer.2.*' is missing, and 15 more"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path, NETWORKS["discriminator"]) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=said):
        network_from_huggingface(tmp_path)


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        network_from_huggingface(tmp_path)
    write(tmp_path, NETWORKS["discriminator"])
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        network_from_huggingface(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin, which is a pickle"):
        network_from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        network_from_huggingface(tmp_path)


def test_another_encoder_is_refused() -> None:
    class Other(Encoder):
        def forward(self, *_: Any, **__: Any) -> Tensor:
            raise NotImplementedError

        def forward_flops(self, *_: Any, **__: Any) -> float:
            raise NotImplementedError

    other = Other()
    other.config = sizes().model_copy(update={"encoder": "other"})
    with pytest.raises(ConfigError, match="encoder 'other' cannot be exported"):
        to_huggingface(Network(other, NETWORKS["discriminator"].head), VOCABULARY)
