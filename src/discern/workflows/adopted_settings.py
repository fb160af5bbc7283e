"""Settings by which a model that came from elsewhere can be measured."""

from __future__ import annotations

from collections.abc import Mapping

from discern.interop.adopted import Adopted, shared
from discern.interop.names import GENERATOR_CLASS, XLNET_CLASS
from discern.model.config import ModelConfig
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.settings import PretrainConfig

_SIZES = (
    "num_layers",
    "hidden_size",
    "embedding_size",
    "num_heads",
    "feedforward_size",
    "max_positions",
    "num_token_types",
    "hidden_dropout",
    "attention_dropout",
    "initializer_range",
    "layer_norm_epsilon",
    "activation",
    "clamp_length",
)
# Of the released code's recipes, by the width they are for.
_RECIPES = {256: "electra-small-google", 768: "electra-base-google", 1024: "electra-large"}
_XLNET_RECIPES = {256: "xlnet-small", 768: "xlnet-base", 1024: "xlnet-large"}


def settings_for(adopted: Adopted) -> PretrainConfig | None:
    """The settings of an objective whose networks these are, or None where there is none: a network may be missing, or share
    with the other what no setting says.

    What is no matter of the weights, as the share of masked tokens, is that of the released code's recipe for their width.
    """
    sizes = adopted.sizes
    if set(sizes) == {"encoder"}:
        (architecture,) = adopted.models["encoder"].config["architectures"]
        if architecture == XLNET_CLASS:
            return _resolved(sizes["encoder"], {}, _XLNET_RECIPES)
        if architecture != GENERATOR_CLASS:
            return None
        return _resolved(sizes["encoder"], {"objective.name": "mlm"})
    if set(sizes) != {"discriminator", "generator"}:
        return None
    model, small = sizes["discriminator"], sizes["generator"]
    width, depth = small.hidden_size / model.hidden_size, small.num_layers / model.num_layers
    if width > 1 or depth > 1:
        return None
    tying = shared(adopted.models["discriminator"], adopted.models["generator"])
    expected = model.shrunk(width, depth)
    own_width = small.hidden_size if tying == "none" else model.embedding_size
    if expected.model_copy(update={"embedding_size": own_width}) != small:
        return None
    chosen: dict[str, object] = {"objective.tying": tying, "objective.generator_size": width, "objective.generator_depth": depth}
    return _resolved(model, chosen)


def _resolved(model: ModelConfig, chosen: Mapping[str, object], recipes: Mapping[int, str] = _RECIPES) -> PretrainConfig:
    """The recipe for a width, with the sizes of a model."""
    recipe = recipes[min(recipes, key=lambda width: abs(width - model.hidden_size))]
    values = {f"model.{name}": getattr(model, name) for name in _SIZES} | dict(chosen)
    overrides = [f"{key}={value}" for key, value in values.items()]
    return load_pretrain_config(None, recipe, overrides).config
