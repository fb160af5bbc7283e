"""Networks that differ from the released ELECTRA: what can be handed over, and what is refused."""

from pathlib import Path

import pytest
import torch
from transformers import ElectraConfig, ElectraForPreTraining, ElectraModel

from discern.errors import ConfigError
from discern.interop.huggingface import to_huggingface
from discern.objectives.base import Vocabulary
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from tests.support import SPECIAL, settings

VOCABULARY = Vocabulary(50, SPECIAL)


def build(model: dict[str, object] | None = None, **options: object) -> ReplacedTokenDetection:
    objective = ReplacedTokenDetection(RTDConfig(**options), settings(**(model or {})))  # type: ignore[arg-type]
    objective.initialise(0)
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


def test_a_bilinear_head_stays_behind() -> None:
    network = build(tying="gradient-disentangled", discriminator_head="bilinear").networks()["discriminator"]
    model = to_huggingface(network, VOCABULARY)
    assert model.config["architectures"] == ["ElectraModel"]
    theirs = ElectraModel(ElectraConfig(**model.config)).eval()
    theirs.load_state_dict({name.removeprefix("electra."): tensor for name, tensor in model.tensors.items()}, strict=True)
    ids = torch.randint(5, 50, (3, 11))
    with torch.no_grad():
        torch.testing.assert_close(network.encoder(ids), theirs(ids).last_hidden_state, atol=1e-5, rtol=0)


def test_pre_norm_has_no_electra_form() -> None:
    network = build({"normalisation": "pre"}).networks()["discriminator"]
    with pytest.raises(ConfigError, match="normalisation"):
        to_huggingface(network, VOCABULARY)
