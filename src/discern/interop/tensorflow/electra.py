"""Imports checkpoints of the released ELECTRA code: maps variables to weights, and infers the sizes from their shapes."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from discern.errors import CheckpointError
from discern.interop.imported_model import Description, Head, ImportedModel, Weights, import_network, weight_names
from discern.interop.tensorflow.bundle import Bundle
from discern.interop.weight_files import and_more
from discern.models.electra.config import ElectraConfig
from discern.objectives.base import Vocabulary
from discern.progress import Progress

KIND = "TensorFlow checkpoint of the released ELECTRA code"
_SLOTS = re.compile(r"/(adam_m|adam_v|Adam|Adam_1)$")
_STEP = "global_step"
_TASK_SCOPE = "task_specific"
_HEAD_WIDTH = 64

# Names of layers: Hugging Face's and the released code's. All other names are the same, with slashes instead of dots.
_LAYERS = (
    ("discriminator_predictions.dense_prediction.", "discriminator_predictions.dense_1."),
    ("generator_lm_head.bias", "generator_predictions.output_bias"),
)
_GIVE = "give a checkpoint of the released ELECTRA code; for any other model, give a Hugging Face folder"


_OBJECT_KEY = "/.ATTRIBUTES/VARIABLE_VALUE"


@dataclass(frozen=True)
class _Scopes:
    """The scopes of the variables of a network.

    Attributes:
        embeddings: scope of the embeddings.
        encoder: scope of the layers.
        head: what the network predicts.
    """

    embeddings: str
    encoder: str
    head: Head

    def variable(self, name: str) -> str:
        """The released code's name of a weight, by Hugging Face's."""
        for theirs, released in _LAYERS:
            if name.startswith(theirs):
                name = released + name.removeprefix(theirs)
        if name.startswith("electra."):
            inner = name.removeprefix("electra.")
            name = f"{self.embeddings if inner.startswith('embeddings.') else self.encoder}.{inner}"
        name = re.sub(r"\.layer\.(\d+)\.", r".layer_\1.", name)
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        if name.endswith("_embeddings.weight"):
            name = name.removesuffix(".weight")
        elif name.endswith(".weight"):
            name = name.removesuffix(".weight") + ".kernel"
        return name.replace(".", "/")


def read_released(prefix: Path, vocabulary: Vocabulary, heads: int | None, progress: Progress) -> ImportedModel:
    """Read the networks in a checkpoint of the released code.

    The networks are recognized by the names of the variables, and their sizes by the shapes. The state of Adam is not read.

    Args:
        prefix: path of the checkpoint's files without the suffix.
        vocabulary: vocabulary of the tokenizer.
        heads: number of attention heads of the discriminator, which cannot be inferred from the weights; None: hidden size / 64,
            as in the released code. The generator always has hidden size / 64.
        progress: reports the number of bytes read.

    Raises:
        CheckpointError: a file is missing or damaged, or the variables are not those of an ELECTRA.
    """
    bundle = Bundle.open(prefix)
    kept = {name for name in bundle.entries if not _SLOTS.search(name) and name != _STEP}
    scopes = _scopes(kept, prefix)
    _verify(bundle, progress)
    descriptions = {name: _description(bundle, each, heads if name != "generator" else None) for name, each in scopes.items()}
    weights = {name: _weights(bundle, each, descriptions[name]) for name, each in scopes.items()}
    taken = {each.variable(name) for network, each in scopes.items() for name in weights[network]}
    left_over = sorted(kept - taken)
    foreign = [name for name in left_over if not name.startswith(f"{_TASK_SCOPE}/")]
    if foreign:
        raise CheckpointError(f"{prefix}: unexpected tensor '{foreign[0]}'{and_more(foreign)}", hint=_GIVE)
    models = {name: import_network(descriptions[name], weights[name], vocabulary, prefix) for name in scopes}
    sizes = {name: description.sizes for name, description in descriptions.items()}
    counter = bundle.entries.get(_STEP)
    step = int(bundle.read(_STEP)) if counter is not None and counter.is_whole_number() else None
    slots = ["Adam's slots"] if any(_SLOTS.search(name) for name in bundle.entries) else []
    remarks = [] if heads is not None else [_remark(next(iter(sizes.values())))]
    return ImportedModel(KIND, models, sizes, step, left_out=[*slots, *left_over], remarks=remarks)


def _remark(sizes: ElectraConfig) -> str:
    return (
        f"the number of attention heads cannot be inferred from the weights; assumed to be {sizes.num_heads} (hidden size / "
        f"{_HEAD_WIDTH}, as in the released code); set it with --heads N"
    )


def _scopes(names: Collection[str], prefix: Path) -> dict[str, _Scopes]:
    """The networks that the variables belong to; the one to fine-tune comes first."""

    def has(scope: str) -> bool:
        return any(name.startswith(f"{scope}/") for name in names)

    objects = next((name for name in names if name.endswith(_OBJECT_KEY)), None)
    if objects is not None:
        raise CheckpointError(
            f"{prefix} is an object-based checkpoint of TensorFlow 2: its keys end in {_OBJECT_KEY}, as in {objects}",
            hint="in the code that wrote it, load the model and save its variables by name with tf.compat.v1.train.Saver, or "
            "convert it to a folder of transformers with save_pretrained()",
        )
    if has("cloze_predictions") or has("generator_ltr"):
        raise CheckpointError(
            f"{prefix} has a two-tower generator, and does not state whether its discriminator outputs logits or energies",
            hint="train the model again with discern: objective.name=electric, or objective.generator=two-tower",
        )
    if "electra/embeddings/word_embeddings" not in names:
        found = sorted({name.partition("/")[0] for name in names})
        shown = ", ".join(found[:6]) or "none"
        raise CheckpointError(f"{prefix} contains no ELECTRA: its variables are in the scopes {shown}", hint=_GIVE)
    judges, speaks = has("discriminator_predictions"), has("generator_predictions")
    own = "generator" if has("generator/embeddings") else "electra"
    found_scopes: dict[str, _Scopes] = {}
    if judges:
        found_scopes["discriminator"] = _Scopes("electra", "electra", "replaced")
    if speaks and has("generator/encoder"):
        found_scopes["generator"] = _Scopes(own, "generator", "words")
    elif speaks:
        # Untied generators have a scope of their own; a tied one is the discriminator with another head.
        found_scopes["generator" if judges else "encoder"] = _Scopes("electra", "electra", "words")
    return found_scopes or {"encoder": _Scopes("electra", "electra", "none")}


def _verify(bundle: Bundle, progress: Progress) -> None:
    """Check all variables, including those that are not imported: if one byte is wrong, others may be as well."""
    progress.start("checking", sum(entry.size for entry in bundle.entries.values()), "bytes")
    for _, entry in bundle.verified():
        progress.advance(entry.size)
    progress.finish()


def _description(bundle: Bundle, scopes: _Scopes, heads: int | None) -> Description:
    """The sizes of a network, inferred from the shapes of its variables."""
    tables, encoder = f"{scopes.embeddings}/embeddings", f"{scopes.encoder}/encoder"
    rows, embedding_size = _shape(bundle, f"{tables}/word_embeddings")
    positions, _ = _shape(bundle, f"{tables}/position_embeddings")
    types, _ = _shape(bundle, f"{tables}/token_type_embeddings")
    hidden, feedforward = _shape(bundle, f"{encoder}/layer_0/intermediate/dense/kernel")
    layers = {found[1] for name in bundle.entries if (found := re.match(rf"{encoder}/layer_(\d+)/", name))}
    number = heads if heads is not None else max(1, hidden // _HEAD_WIDTH)
    try:
        sizes = ElectraConfig(
            num_layers=len(layers),
            hidden_size=hidden,
            embedding_size=embedding_size,
            num_heads=number,
            feedforward_size=feedforward,
            max_positions=positions,
            num_token_types=types,
        )
    except ValidationError as problem:
        reasons = "; ".join(error["msg"].removeprefix("Value error, ") for error in problem.errors())
        raise CheckpointError(f"{bundle.prefix}: {reasons}", hint="set the number of attention heads with --heads N") from problem
    return Description(scopes.head, rows, sizes)


def _shape(bundle: Bundle, name: str) -> tuple[int, int]:
    """The shape of a matrix that every ELECTRA has."""
    entry = bundle.entries.get(name)
    if entry is None or len(entry.shape) != 2:
        found = "is missing" if entry is None else f"has shape {list(entry.shape)}"
        raise CheckpointError(f"{bundle.prefix}: '{name}' {found}, expected a matrix", hint=_GIVE)
    return entry.shape[0], entry.shape[1]


def _weights(bundle: Bundle, scopes: _Scopes, description: Description) -> Weights:
    """The weights of a network that are present, by Hugging Face's names."""
    variables = {name: scopes.variable(name) for name in weight_names(description)}
    return {name: partial(_read, bundle, variable) for name, variable in variables.items() if variable in bundle.entries}


def _read(bundle: Bundle, variable: str) -> Tensor:
    """A variable in the shape in which Hugging Face stores it: kernels are (out, in)."""
    tensor = bundle.read(variable)
    if not tensor.is_floating_point():
        found = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{bundle.prefix}: '{variable}' has data type {found}, expected floating point", hint=_GIVE)
    return tensor.to(torch.float32).t() if variable.endswith("/kernel") else tensor.to(torch.float32)
