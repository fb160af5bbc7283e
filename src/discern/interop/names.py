"""Which parameter of ours is which of Hugging Face's ELECTRA, and which file of a folder it stands in."""

from __future__ import annotations

from torch import Tensor

from discern.errors import ConfigError
from discern.model.bert import BertEncoder
from discern.model.embeddings import DisentangledEmbeddings
from discern.model.encoder import Encoder
from discern.model.heads import CopyMLMHead, TokenHead
from discern.model.network import Network
from discern.model.two_tower import TwoTowerEncoder

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
HEAD_NAME = "discern_head.safetensors"
"""What ELECTRA cannot hold of a head: a bilinear discriminator's as a whole, the gate of one that copies."""
CALIBRATION_NAME = "detection.json"
"""What `discern detect --calibrate` leaves beside a discriminator."""
DISCRIMINATOR_CLASS = "ElectraForPreTraining"
ENCODER_CLASS = "ElectraModel"
GENERATOR_CLASS = "ElectraForMaskedLM"
TWO_TOWER_CLASS = "DiscernTwoTowerForMaskedLM"
TWO_TOWER_FAMILY = "discern-two-tower"
"""Of a cloze network, which transformers has no class for: it refuses the folder, where it would else load a part."""
FAMILIES = ("electra", TWO_TOWER_FAMILY)
"""Values of `model_type` in config.json that our own folders have."""
XLNET_CLASS = "XLNetLMHeadModel"
XLNET_ENCODER_CLASS = "XLNetModel"
UNLIMITED_POSITIONS = 1_000_000
"""`max_positions` of an encoder that has no table of them and says nothing else."""

# Our name -> theirs, of the layers that have a weight and a bias.
_BLOCK_LAYERS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "feedforward_norm": "output.LayerNorm",
}
_DISCRIMINATOR_LAYERS = {"dense": "dense", "output": "dense_prediction"}
_GENERATOR_LAYERS = {"dense": "dense", "norm": "LayerNorm"}
_COPY_GATE = "head.copy_gate"
_TABLES = {"word": "word_embeddings", "position": "position_embeddings", "token_type": "token_type_embeddings"}


def parameter_names(network: Network) -> dict[str, str]:
    """Hugging Face's name of every parameter, by ours: `encoder.<name in the encoder>`, `head.<name in the head>`, and
    `bilinear.<name in the term>`, for which the name is our own, as it is for the gate of a head that copies.

    The tied output matrix of a masked language model is the word table and is named once, as that.

    Raises:
        ConfigError: the encoder is neither the BERT-style one nor two of them.
    """
    names = {f"encoder.{ours}": f"electra.{theirs}" for ours, theirs in encoder_names(network.encoder).items()}
    if isinstance(network.head, TokenHead):
        for ours, theirs in _DISCRIMINATOR_LAYERS.items():
            names |= _both(f"head.{ours}", f"discriminator_predictions.{theirs}")
        return names | ({} if network.bilinear is None else {"bilinear.context.weight": "bilinear_term.context.weight"})
    copies = isinstance(network.head, CopyMLMHead)
    words = "head.words" if copies else "head"
    for ours, theirs in _GENERATOR_LAYERS.items():
        names |= _both(f"{words}.{ours}", f"generator_predictions.{theirs}")
    names |= {f"{words}.bias": "generator_lm_head.bias"}
    return names | (_both(_COPY_GATE, "copy_gate") if copies else {})


def encoder_names(encoder: Encoder) -> dict[str, str]:
    """Hugging Face's name of every parameter of an encoder, by ours; theirs without the `electra.` that heads put before it.

    BERT's names are the same, and `bert.` stands before them. Those of two towers are our own, in the same manner.

    Raises:
        ConfigError: the encoder is neither the BERT-style one nor two of them.
    """
    if isinstance(encoder, TwoTowerEncoder):
        return _two_tower_names(encoder)
    if not isinstance(encoder, BertEncoder):
        raise ConfigError(
            f"encoder '{encoder.config.encoder}' has no Hugging Face ELECTRA form as {type(encoder).__name__}",
            hint="only a BertEncoder can be exported to ELECTRA; leave out --all-networks, or choose another with --network",
        )
    if encoder.config.normalisation != "post":
        raise ConfigError(
            f"ELECTRA has its LayerNorms after each residual; here model.normalisation is '{encoder.config.normalisation}'",
            hint="train with model.normalisation=post to export; `discern detect` takes the run as it is",
        )
    names = {f"embeddings.{ours}.weight": f"embeddings.{theirs}.weight" for ours, theirs in _TABLES.items()}
    names |= _both("embeddings.norm", "embeddings.LayerNorm")
    if encoder.projection is not None:
        names |= _both("projection", "embeddings_project")
    for index in range(len(encoder.blocks)):
        for ours, theirs in _BLOCK_LAYERS.items():
            names |= _both(f"blocks.{index}.{ours}", f"encoder.layer.{index}.{theirs}")
    return names


def _two_tower_names(encoder: TwoTowerEncoder) -> dict[str, str]:
    """As if each tower were an encoder, but for the embeddings, which they share."""
    left = encoder_names(encoder.left)
    names = {ours: theirs for ours, theirs in left.items() if ours.startswith("embeddings.")}
    for side in ("left", "right"):
        names |= {f"{side}.{ours}": f"{side}.{theirs}" for ours, theirs in left.items() if not ours.startswith("embeddings.")}
    return names


def names_by_file(network: Network) -> dict[str, dict[str, str]]:
    """`parameter_names` by the file that the parameters stand in."""
    names = parameter_names(network)
    if network.bilinear is not None:
        beside = {ours: theirs for ours, theirs in names.items() if not ours.startswith("encoder.")}
    else:
        beside = {ours: theirs for ours, theirs in names.items() if ours.startswith(_COPY_GATE)}
    held = {ours: theirs for ours, theirs in names.items() if ours not in beside}
    return {WEIGHTS_NAME: held, HEAD_NAME: beside} if beside else {WEIGHTS_NAME: held}


def named_parameters(network: Network) -> dict[str, Tensor]:
    """Parameters by our name; the word table that a head shares stands under the encoder's name only."""
    found = {f"encoder.{name}": value for name, value in encoder_parameters(network.encoder).items()}
    taken = {id(value) for value in found.values()}
    found |= {f"head.{name}": value for name, value in network.head.named_parameters() if id(value) not in taken}
    bilinear = network.bilinear.named_parameters() if network.bilinear is not None else ()
    return found | {f"bilinear.{name}": value for name, value in bilinear}


def encoder_parameters(encoder: Encoder) -> dict[str, Tensor]:
    """Parameters of an encoder by our name; embeddings that are another's plus a difference stand as their sum."""
    found: dict[str, Tensor] = dict(encoder.named_parameters())
    if isinstance(encoder.embeddings, DisentangledEmbeddings):
        found = {name: value for name, value in found.items() if not name.startswith("embeddings.")}
        found |= {f"embeddings.{name}": value for name, value in encoder.embeddings.merged().named_parameters()}
    return found


def architecture(network: Network) -> str:
    """The class of transformers that holds what ELECTRA can hold of the network; of two towers, a name that is no class."""
    if isinstance(network.encoder, TwoTowerEncoder):
        return TWO_TOWER_CLASS
    if network.bilinear is not None:
        return ENCODER_CLASS
    return DISCRIMINATOR_CLASS if isinstance(network.head, TokenHead) else GENERATOR_CLASS


def _both(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}
