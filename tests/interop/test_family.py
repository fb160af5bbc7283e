"""The networks of every objective: which of them transformers can hold, and that they come back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from discern.interop.config_json import MARK
from discern.interop.huggingface import is_discriminator, network_from_huggingface, to_huggingface
from discern.models.base import Network
from discern.models.heads import CopyMLMHead, EnergyHead
from discern.models.two_tower import TwoTowerEncoder
from discern.objectives import objectives
from discern.objectives.base import Objective, Vocabulary
from tests.support import MODELS, SPECIAL, settings

ELECTRAS = [name for name in objectives.names() if name not in MODELS]
VOCABULARY = Vocabulary(50, SPECIAL)
IDS = torch.randint(5, 50, (3, 11), generator=torch.Generator().manual_seed(0))


def build(name: str) -> Objective:
    factory = objectives.load(name)
    objective: Objective = factory(factory.Config(), settings(initializer_range=0.3))
    objective.initialize(0)
    return objective.eval()


def back(network: Network, folder: Path) -> Network:
    to_huggingface(network, VOCABULARY).write(folder)
    return network_from_huggingface(folder)


@pytest.mark.parametrize("name", ELECTRAS)
def test_the_first_network_comes_back_and_transformers_agrees(name: str, tmp_path: Path) -> None:
    network = next(iter(build(name).networks().values()))
    model = to_huggingface(network, VOCABULARY)
    judges = model.config["architectures"] == ["ElectraForPreTraining"]
    theirs = (ElectraForPreTraining if judges else ElectraForMaskedLM)(ElectraConfig(**model.config)).eval()
    state = model.tensors if judges else model.tensors | {"generator_lm_head.weight": network.encoder.embeddings.weights}
    theirs.load_state_dict(state, strict=True)
    again = back(network, tmp_path)
    assert is_discriminator(tmp_path) is judges
    assert type(again.head) is type(network.head)
    with torch.no_grad():
        torch.testing.assert_close(network.token_logits(IDS), theirs(IDS).logits, atol=1e-5, rtol=0)
        assert torch.equal(network.token_logits(IDS), again.token_logits(IDS))


def test_the_copy_gate_comes_back(tmp_path: Path) -> None:
    network = build("all-tokens-mlm").networks()["encoder"]
    again = back(network, tmp_path)
    assert isinstance(network.head, CopyMLMHead)
    assert isinstance(again.head, CopyMLMHead)
    assert torch.equal(again.head.copy_gate.weight, network.head.copy_gate.weight)
    assert torch.equal(again.head.copy_gate.bias, network.head.copy_gate.bias)


def test_energies_are_marked_as_such(tmp_path: Path) -> None:
    """They are no logits of *replaced*, and whoever reads the folder must not take them for that."""
    network = build("electric").networks()["discriminator"]
    assert to_huggingface(network, VOCABULARY).config[MARK] == {"gives": "energy"}
    assert isinstance(back(network, tmp_path).head, EnergyHead)


def test_two_towers_come_back_and_transformers_refuses_them(tmp_path: Path) -> None:
    network = build("electric").networks()["generator"]
    assert isinstance(network.encoder, TwoTowerEncoder)
    again = back(network, tmp_path)
    assert isinstance(again.encoder, TwoTowerEncoder)
    assert again.encoder.left.embeddings is again.encoder.right.embeddings is again.encoder.embeddings
    with torch.no_grad():
        assert torch.equal(network.token_logits(IDS), again.token_logits(IDS))
    stored = to_huggingface(network, VOCABULARY).num_parameters
    assert stored == sum(value.numel() for value in {*network.encoder.parameters(), *network.head.parameters()})
    with pytest.raises(ValueError, match="discern-two-tower"):
        AutoModel.from_pretrained(tmp_path)
