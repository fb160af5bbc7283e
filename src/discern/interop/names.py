"""Names of files, classes and weights in Hugging Face folders."""

from __future__ import annotations

from torch import Tensor

from discern.errors import ConfigError
from discern.models.base import Encoder, Network
from discern.models.electra.encoder import BertEncoder
from discern.models.electra.huggingface import to_huggingface
from discern.models.embeddings import Disentangled
from discern.models.heads import TokenHead
from discern.models.two_tower import TwoTowerEncoder

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
HEAD_NAME = "discern_head.safetensors"
"""Weights that ELECTRA cannot represent: the whole head of a discriminator with a bilinear term, or the gate of a copy head."""
CALIBRATION_NAME = "detection.json"
"""File that `discern detect --calibrate` writes beside a discriminator."""
DISCRIMINATOR_CLASS = "ElectraForPreTraining"
ENCODER_CLASS = "ElectraModel"
GENERATOR_CLASS = "ElectraForMaskedLM"
TWO_TOWER_CLASS = "DiscernTwoTowerForMaskedLM"
TWO_TOWER_FAMILY = "discern-two-tower"
"""`model_type` of a two-tower network, for which transformers has no class. With it transformers rejects the folder instead of
loading a part of the weights."""
OWN_MODEL_TYPES = ("electra", TWO_TOWER_FAMILY)
"""Values of `model_type` in config.json of our own folders."""
XLNET_CLASS = "XLNetLMHeadModel"
XLNET_ENCODER_CLASS = "XLNetModel"
MODERNBERT_LM_CLASS = "ModernBertForMaskedLM"
MODERNBERT_ENCODER_CLASS = "ModernBertModel"
MODERNBERT_TAGGER_CLASS = "ModernBertForTokenClassification"
UNLIMITED_POSITIONS = 1_000_000
"""`max_positions` of an encoder without a table of positions."""


def parameter_names(network: Network) -> dict[str, str]:
    """Hugging Face's name of every parameter, by our name.

    Our names are `encoder.<name in the encoder>`, `head.<name in the head>` and `bilinear.<name in the term>`. The bilinear term
    and the gate of a copy head keep our names, as Hugging Face has none for them. The tied output matrix of a masked language
    model appears once, under the name of the word embeddings.

    Raises:
        ConfigError: the encoder is neither a BERT-style encoder nor a two-tower encoder.
    """
    _check_form(network.encoder)
    ours = named_parameters(network)
    return dict(zip(ours, to_huggingface(ours), strict=True))


def encoder_weights(encoder: Encoder) -> dict[str, Tensor]:
    """The parameters of an encoder by Hugging Face's names, which start with `electra.` (in a BERT, with `bert.` instead).

    Raises:
        ConfigError: the encoder is neither a BERT-style encoder nor a two-tower encoder.
    """
    _check_form(encoder)
    return to_huggingface({f"encoder.{name}": value for name, value in encoder_parameters(encoder).items()})


def _check_form(encoder: Encoder) -> None:
    tower = encoder.left if isinstance(encoder, TwoTowerEncoder) else encoder
    if not isinstance(tower, BertEncoder):
        what = "two towers of encoder" if isinstance(encoder, TwoTowerEncoder) else "encoder"
        raise ConfigError(
            f"{what} '{encoder.config.encoder}' cannot be exported: transformers has no class for it",
            hint="leave out --all-networks, or choose another network with --network; discern takes the run as it is",
        )
    if tower.config.normalization != "post":
        raise ConfigError(
            f"ELECTRA has its LayerNorms after each residual, but model.normalization is '{tower.config.normalization}'",
            hint="train with model.normalization=post to export; `discern detect` accepts the run as it is",
        )


def names_by_file(network: Network) -> dict[str, dict[str, str]]:
    """`parameter_names`, grouped by the file that contains the parameters."""
    names = parameter_names(network)
    if network.bilinear is not None:
        beside = {ours: theirs for ours, theirs in names.items() if not ours.startswith("encoder.")}
    else:
        beside = {ours: theirs for ours, theirs in names.items() if ours.startswith("head.copy_gate")}
    held = {ours: theirs for ours, theirs in names.items() if ours not in beside}
    return {WEIGHTS_NAME: held, HEAD_NAME: beside} if beside else {WEIGHTS_NAME: held}


def named_parameters(network: Network) -> dict[str, Tensor]:
    """Parameters by our name; a word table that is shared with a head appears only under the encoder's name."""
    found = {f"encoder.{name}": value for name, value in encoder_parameters(network.encoder).items()}
    taken = {id(value) for value in found.values()}
    found |= {f"head.{name}": value for name, value in network.head.named_parameters() if id(value) not in taken}
    bilinear = network.bilinear.named_parameters() if network.bilinear is not None else ()
    return found | {f"bilinear.{name}": value for name, value in bilinear}


def encoder_parameters(encoder: Encoder) -> dict[str, Tensor]:
    """Parameters of an encoder by our names. Embeddings defined as those of another network plus a difference are summed."""
    found: dict[str, Tensor] = dict(encoder.named_parameters())
    if isinstance(encoder.embeddings, Disentangled):
        found = {name: value for name, value in found.items() if not name.startswith("embeddings.")}
        found |= {f"embeddings.{name}": value for name, value in encoder.embeddings.merged().named_parameters()}
    return found


def architecture(network: Network) -> str:
    """The class of transformers for the part of the network that ELECTRA can represent; for two towers, a name of our own."""
    if isinstance(network.encoder, TwoTowerEncoder):
        return TWO_TOWER_CLASS
    if network.bilinear is not None:
        return ENCODER_CLASS
    return DISCRIMINATOR_CLASS if isinstance(network.head, TokenHead) else GENERATOR_CLASS
