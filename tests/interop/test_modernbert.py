"""ModernBERT folders: ours in transformers, transformers' here, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from discern.errors import CheckpointError, ConfigError
from discern.interop.families import family_in, to_huggingface
from discern.interop.modernbert import encoder_from_huggingface, load_huggingface_weights, network_from_huggingface
from discern.models.base import Network
from discern.models.embeddings import Disentangled
from discern.models.heads import CopyMLMHead, EnergyHead, MaskedLMHead, ReplacedTokenHead
from discern.models.modernbert.config import ModernBertConfig
from discern.objectives.base import Objective
from tests.parity.small_networks import VOCABULARY, build, sizes

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
MODERN: dict[str, Any] = {"encoder": "modernbert", "embedding_size": 32, "local_window": 8, "num_layers": 4}
THEIRS: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4}
THEIRS |= {"num_hidden_layers": 4, "local_attention": 8, "max_position_embeddings": 64, "pad_token_id": 0, "cls_token_id": 2}
THEIRS |= {"sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
IDS = torch.tensor([[2, 9, 17, 33, 96, 5, 8, 44, 21, 13, 60, 71, 3]])


def objective(name: str = "rtd", *, model: dict[str, Any] | None = None, seed: int = 0, **settings: Any) -> Objective:
    given = {key: value for key, value in {**MODERN, **(model or {})}.items() if key != "max_positions"}
    return build(sizes(**given), name, seed=seed, **settings)


def written(network: Network, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    to_huggingface(network, VOCABULARY).write(folder)
    return folder


def edit(folder: Path, *without: str, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in without} | changes
    (folder / "config.json").write_text(json.dumps(config))


def logits(network: Network) -> torch.Tensor:
    with torch.no_grad():
        return network.token_logits(IDS)


CASES: dict[str, tuple[str, str, dict[str, Any], type[nn.Module]]] = {
    "discriminator": ("discriminator", "rtd", {}, ReplacedTokenHead),
    "disentangled": ("discriminator", "rtd", {"tying": "gradient-disentangled"}, ReplacedTokenHead),
    "bilinear": ("discriminator", "rtd", {"discriminator_head": "bilinear"}, ReplacedTokenHead),
    "narrow generator": ("generator", "rtd", {"generator_size": 0.5}, MaskedLMHead),
    "generator as wide": ("generator", "rtd", {"generator_size": 1.0}, MaskedLMHead),
    "energies": ("discriminator", "electric", {}, EnergyHead),
    "masked language model": ("encoder", "mlm", {}, MaskedLMHead),
    "copying": ("encoder", "all-tokens-mlm", {}, CopyMLMHead),
}


@pytest.mark.parametrize("case", CASES)
def test_out_and_in_again(case: str, tmp_path: Path) -> None:
    """Another network filled from the folder, and one built from the folder alone, compute the same."""
    name, kind, settings, head = CASES[case]
    network = objective(kind, **settings).networks()[name]
    folder = written(network, tmp_path / "out")
    again = network_from_huggingface(folder)
    assert type(again.head) is head
    torch.testing.assert_close(logits(again), logits(network), **TOLERANCE)
    if isinstance(network.head, CopyMLMHead) and isinstance(again.head, CopyMLMHead):
        assert torch.equal(again.head.copy_gate.weight, network.head.copy_gate.weight)
    other = objective(kind, seed=1, **settings)
    if isinstance(other.networks()[name].encoder.embeddings, Disentangled):
        generator = written(objective(kind, **settings).networks()["generator"], tmp_path / "generator")
        load_huggingface_weights(other.networks()["generator"], generator)
    load_huggingface_weights(other.networks()[name], folder)
    torch.testing.assert_close(logits(other.networks()[name]), logits(network), **TOLERANCE)
    # Written again from what was read, the files are the same.
    once_more = written(again, tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (once_more / file).read_bytes() == (folder / file).read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_all_of_it(case: str, tmp_path: Path) -> None:
    import transformers

    name, kind, settings, _ = CASES[case]
    network = objective(kind, **settings).networks()[name]
    folder = written(network, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    model, info = getattr(transformers, config["architectures"][0]).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) == set()
    with torch.no_grad():
        found = model.eval()(IDS)
        if case == "bilinear":
            torch.testing.assert_close(found.last_hidden_state, network.encoder(IDS), **TOLERANCE)
        elif case in ("discriminator", "disentangled", "energies"):
            torch.testing.assert_close(found.logits.squeeze(-1), logits(network), **TOLERANCE)
            assert model.config.id2label == {0: "energy" if case == "energies" else "replaced"}
        else:
            torch.testing.assert_close(found.logits, logits(network), **TOLERANCE)


def test_config_json_has_both_forms(tmp_path: Path) -> None:
    """Servers read the older keys, transformers the newer ones; every id is a number."""
    folder = written(
        objective(model={"full_attention_every": 2, "local_rope_theta": 500.0}).networks()["discriminator"], tmp_path
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"] * 2
    assert config["global_attn_every_n_layers"] == 2
    assert config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 500.0}
    assert (config["global_rope_theta"], config["local_rope_theta"]) == (160_000.0, 500.0)
    assert [config[f"{role}_token_id"] for role in ("pad", "cls", "sep", "bos", "eos")] == [0, 2, 3, 2, 3]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A masked language model that transformers wrote, with every parameter far from its default."""
    from transformers import ModernBertConfig as TheirConfig
    from transformers import ModernBertForMaskedLM

    torch.manual_seed(0)
    model = ModernBertForMaskedLM(TheirConfig(**THEIRS))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    model.save_pretrained(tmp_path)
    return tmp_path


def expected_logits(folder: Path) -> torch.Tensor:
    from transformers import ModernBertForMaskedLM

    with torch.no_grad():
        found: torch.Tensor = ModernBertForMaskedLM.from_pretrained(folder).eval()(IDS).logits
        return found


def test_what_transformers_writes_is_read(theirs: Path) -> None:
    network = network_from_huggingface(theirs)
    torch.testing.assert_close(logits(network), expected_logits(theirs), **TOLERANCE)
    assert family_in(theirs).pretrained_type == "modernbert"
    assert isinstance(network.encoder.config, ModernBertConfig)
    assert network.encoder.config.max_positions == 64


def test_the_older_form_of_the_configuration_is_read(theirs: Path) -> None:
    edit(theirs, "layer_types", "rope_parameters", global_attn_every_n_layers=2, global_rope_theta=700.0, local_rope_theta=30.0)
    torch.testing.assert_close(logits(network_from_huggingface(theirs)), expected_logits(theirs), **TOLERANCE)
    edit(theirs, "global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")  # the defaults
    torch.testing.assert_close(logits(network_from_huggingface(theirs)), expected_logits(theirs), **TOLERANCE)


def test_a_base_that_is_null_is_that_of_full_attention(theirs: Path) -> None:
    edit(theirs, "layer_types", "rope_parameters", global_rope_theta=700.0, local_rope_theta=None)
    config = network_from_huggingface(theirs).encoder.config
    assert isinstance(config, ModernBertConfig)
    assert (config.full_rope_theta, config.local_rope_theta) == (700.0, 700.0)


def test_a_classifier_with_the_label_of_a_discriminator_is_none(tmp_path: Path) -> None:
    from transformers import ModernBertConfig as TheirConfig
    from transformers import ModernBertForSequenceClassification

    settings = TheirConfig(**THEIRS, id2label={0: "energy"}, problem_type="regression")
    ModernBertForSequenceClassification(settings).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has no pre-training head"):
        network_from_huggingface(tmp_path)


def test_a_bare_encoder_and_a_head_of_a_task_are_read(tmp_path: Path) -> None:
    from transformers import ModernBertConfig as TheirConfig
    from transformers import ModernBertForSequenceClassification, ModernBertModel

    for kind in (ModernBertModel, ModernBertForSequenceClassification):
        torch.manual_seed(0)
        model = kind(TheirConfig(**THEIRS)).eval()
        model.save_pretrained(tmp_path / kind.__name__)
        encoder = encoder_from_huggingface(tmp_path / kind.__name__)
        with torch.no_grad():
            states = (model if kind is ModernBertModel else model.model)(IDS).last_hidden_state
            torch.testing.assert_close(encoder(IDS), states, **TOLERANCE)
        with pytest.raises(CheckpointError, match="has no pre-training head"):
            network_from_huggingface(tmp_path / kind.__name__)


def test_a_decoder_without_bias_has_zeros(theirs: Path) -> None:
    tensors = load_file(theirs / "model.safetensors")
    del tensors["decoder.bias"]
    save_file(tensors, theirs / "model.safetensors", {"format": "pt"})
    edit(theirs, decoder_bias=False)
    torch.testing.assert_close(logits(network_from_huggingface(theirs)), expected_logits(theirs), **TOLERANCE)


ROPE = {"full_attention": {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_parameters": ROPE}, "rope_parameters.full_attention.rope_type is 'yarn', but only 'default' is supported"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters has the key 'rope_type'"),
        ({"rope_parameters": {"full_attention": {"type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "has 'partial_rotary_factor'"),
        ({"rope_parameters": []}, "rope_parameters is .*, expected an object"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
        ({"layer_types": ["sliding_attention"] * 4}, "only full attention in every n-th layer from the first on"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu', but only 'gelu'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"num_attention_heads": 32}, "attention heads of width 1 .* cannot be rotated in pairs"),
        ({"num_attention_heads": 5}, "num_heads"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"intermediate_size": 20}, "model.layers.0.mlp.Wi.weight"),
        ({"num_hidden_layers": 5, "layer_types": None}, "'model.layers.4.*' is missing"),
        ({"num_hidden_layers": 3, "layer_types": None}, "unexpected tensor 'model.layers.3"),
    ],
)
def test_what_is_not_supported_is_named(theirs: Path, changes: dict[str, Any], says: str) -> None:
    edit(theirs, **changes)
    with pytest.raises(CheckpointError, match=says):
        network_from_huggingface(theirs)


@pytest.mark.parametrize("name", ["bert.encoder.layers.0.mixer.Wqkv.weight", "bert.encoder.layers.0.attn.Wqkv.weight"])
def test_the_layout_of_flash_attn_is_named(theirs: Path, name: str) -> None:
    tensors = load_file(theirs / "model.safetensors")
    tensors[name] = tensors.pop("model.layers.0.attn.Wqkv.weight")
    save_file(tensors, theirs / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="flash_attn's BERT or of ModernBERT's training code") as caught:
        network_from_huggingface(theirs)
    assert "convert the model" in str(caught.value.hint)


def test_an_untied_decoder_is_refused(theirs: Path) -> None:
    tensors = load_file(theirs / "model.safetensors")
    tensors["decoder.weight"] = tensors["model.embeddings.tok_embeddings.weight"] + 1
    save_file(tensors, theirs / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'decoder.weight' differs from the word embeddings"):
        network_from_huggingface(theirs)


def test_networks_without_a_form_are_refused() -> None:
    towers = objective("electric").networks()["generator"]
    with pytest.raises(ConfigError, match="modernbert"):
        to_huggingface(towers, VOCABULARY)
    narrow = objective(model={"embedding_size": 16}, discriminator_head="bilinear").networks()["discriminator"]
    with pytest.raises(ConfigError, match="the bilinear term reads words of width 16"):
        to_huggingface(narrow, VOCABULARY)
