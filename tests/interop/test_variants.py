"""Networks that differ from the released ELECTRA: what can be handed over, and what is refused."""

from pathlib import Path

import pytest
import torch
from transformers import ElectraConfig, ElectraForPreTraining, ElectraModel

from discern.errors import CheckpointError, ConfigError
from discern.interop.config_json import MARK
from discern.interop.huggingface import is_discriminator, load_huggingface_weights, network_from_huggingface, to_huggingface
from discern.interop.names import HEAD_NAME
from discern.objectives.base import Vocabulary
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from tests.support import SPECIAL, settings

VOCABULARY = Vocabulary(50, SPECIAL)


def build(model: dict[str, object] | None = None, **options: object) -> ReplacedTokenDetection:
    objective = ReplacedTokenDetection(RTDConfig(**options), settings(**(model or {})))  # type: ignore[arg-type]
    objective.initialize(0)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return objective.eval()


def test_disentangled_embeddings_are_merged(tmp_path: Path) -> None:
    network = build(tying="gradient-disentangled").networks()["discriminator"]
    model = to_huggingface(network, VOCABULARY)
    theirs = ElectraForPreTraining(ElectraConfig(**model.config)).eval()
    theirs.load_state_dict(model.tensors, strict=True)
    ids = torch.randint(5, 50, (3, 11))
    with torch.no_grad():
        torch.testing.assert_close(network.token_logits(ids), theirs(ids).logits, atol=1e-5, rtol=0)


def test_with_a_bilinear_head_transformers_has_the_encoder() -> None:
    network = build(tying="gradient-disentangled", discriminator_head="bilinear").networks()["discriminator"]
    model = to_huggingface(network, VOCABULARY)
    assert model.config["architectures"] == ["ElectraModel"]
    theirs = ElectraModel(ElectraConfig(**model.config)).eval()
    theirs.load_state_dict({name.removeprefix("electra."): tensor for name, tensor in model.tensors.items()}, strict=True)
    ids = torch.randint(5, 50, (3, 11))
    with torch.no_grad():
        torch.testing.assert_close(network.encoder(ids), theirs(ids).last_hidden_state, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_bilinear_head_stands_beside_and_is_read_back(precision: str, tmp_path: Path) -> None:
    network = build(tying="gradient-disentangled", discriminator_head="bilinear").networks()["discriminator"]
    model = to_huggingface(network, VOCABULARY, precision)
    model.write(tmp_path)
    assert model.config[MARK] == {"head": HEAD_NAME}
    assert {tensor.dtype for tensor in model.head.values()} == {getattr(torch, precision)}
    assert is_discriminator(tmp_path)
    loaded = network_from_huggingface(tmp_path)
    assert loaded.bilinear is not None
    ids = torch.randint(5, 50, (3, 11))
    with torch.no_grad():
        tolerance = 1e-5 if precision == "float32" else 0.1
        torch.testing.assert_close(loaded.token_logits(ids), network.token_logits(ids), atol=tolerance, rtol=0)
    (tmp_path / HEAD_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"has no discern_head\.safetensors, which contains the head"):
        network_from_huggingface(tmp_path)


@pytest.mark.parametrize("tying", ["embeddings", "token", "none", "gradient-disentangled"])
@pytest.mark.parametrize("head", ["dense", "bilinear"])
def test_weights_go_back_into_any_way_of_sharing(tying: str, head: str, tmp_path: Path) -> None:
    source, target = (build(tying=tying, discriminator_head=head) for _ in range(2))
    ids = torch.randint(5, 50, (3, 11))
    for name in ("generator", "discriminator"):
        (tmp_path / name).mkdir()
        to_huggingface(source.networks()[name], VOCABULARY).write(tmp_path / name)
        load_huggingface_weights(target.networks()[name], tmp_path / name)
    with torch.no_grad():
        for name, network in source.networks().items():
            torch.testing.assert_close(network.token_logits(ids), target.networks()[name].token_logits(ids), atol=1e-5, rtol=0)


def test_a_discriminator_with_positions_of_its_own_cannot_read_another_generators(tmp_path: Path) -> None:
    to_huggingface(build(tying="none").networks()["discriminator"], VOCABULARY).write(tmp_path)
    target = build(tying="gradient-disentangled").networks()["discriminator"]
    with pytest.raises(CheckpointError, match="its position embeddings differ from those of the generator"):
        load_huggingface_weights(target, tmp_path)


def test_pre_norm_has_no_electra_form() -> None:
    network = build({"normalization": "pre"}).networks()["discriminator"]
    with pytest.raises(ConfigError, match="normalization"):
        to_huggingface(network, VOCABULARY)
