"""Networks in somebody else's Hugging Face folder: an ELECTRA with either head or none, or a BERT.

BERT's masked language model is computed as ELECTRA's generator is, with embeddings as wide as the states, so it is taken over
whole. Nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch

from discern.errors import CheckpointError
from discern.interop.adopted import Adopted, Description, Head, Weights, adopt, weight_names
from discern.interop.config_json import SUPPORTED, model_config, read_huggingface_config, whole_number
from discern.interop.huggingface import and_more
from discern.interop.names import CONFIG_NAME
from discern.interop.pretrained import FAMILIES
from discern.interop.stored import Stored, stored_weights
from discern.interop.tokenizer import read_max_length
from discern.objectives.base import Vocabulary

_KINDS = {"electra": "Hugging Face ELECTRA", "bert": "Hugging Face BERT"}
# Hugging Face's name of an ELECTRA's weight -> of a BERT's.
_AS_BERT = {
    "electra.": "bert.",
    "generator_predictions.": "cls.predictions.transform.",
    "generator_lm_head.bias": "cls.predictions.bias",
}
_HEADS: dict[str, Head] = {
    "discriminator_predictions.dense.weight": "replaced",
    "generator_predictions.dense.weight": "words",
    "cls.predictions.transform.dense.weight": "words",
}
_NETWORKS: dict[Head, str] = {"replaced": "discriminator", "words": "generator", "none": "encoder"}
# Copies that transformers may write of the tied matrix and of the bias, and counting buffers.
_COPIES = ("generator_lm_head.weight", "cls.predictions.decoder.weight")
_BUFFERS = ("position_ids", "embeddings.token_type_ids")
_BIAS_COPY = "cls.predictions.decoder.bias"
_OWN_PARTS = ("embeddings.", "embeddings_project.", "encoder.")


def read_huggingface(folder: Path, vocabulary: Vocabulary) -> Adopted:
    """The network in a folder that save_pretrained() wrote.

    Args:
        vocabulary: of its tokenizer.

    Raises:
        CheckpointError: a file is missing or damaged or could run code, the model is of another family or has an option that
            ours has not, or a weight is missing, is left over, or has another shape than config.json says.
    """
    config, path = read_huggingface_config(folder, FAMILIES), folder / CONFIG_NAME
    sizes = model_config(config, path, {**SUPPORTED, "is_decoder": False, "add_cross_attention": False})
    family, rows = config["model_type"], whole_number(config, "vocab_size", path)
    with stored_weights(folder) as stored:
        head: Head = next((head for name, head in _HEADS.items() if name in stored.tensors), "none")
        description = Description(head, rows, sizes)
        names = {name: _stored_name(name, family, stored) for name in weight_names(description)}
        _check_tied(stored, names)
        weights: Weights = {name: partial(stored.read, theirs) for name, theirs in names.items() if theirs in stored.tensors}
        left_out = _left_out(stored, set(names.values()), family)
        model = adopt(description, weights, vocabulary, stored.path)
    name = "encoder" if family == "bert" else _NETWORKS[head]
    length = read_max_length(folder, sizes.max_positions)
    return Adopted(_KINDS[family], {name: model}, {name: sizes}, max_length=length, left_out=left_out)


def _stored_name(name: str, family: str, stored: Stored) -> str:
    """What a weight is called in the folder, by ELECTRA's name."""
    if family == "bert":
        for electra, bert in _AS_BERT.items():
            if name.startswith(electra):
                name = bert + name.removeprefix(electra)
                break
    # An encoder saved alone has nothing before its names.
    alone = not any(each.startswith(f"{family}.") for each in stored.tensors)
    return name.removeprefix(f"{family}.") if alone else name


def _check_tied(stored: Stored, names: dict[str, str]) -> None:
    """Refuse an output matrix of its own, which ours have not."""
    words = names["electra.embeddings.word_embeddings.weight"]
    for copy in _COPIES:
        if copy in stored.tensors and words in stored.tensors and not torch.equal(stored.read(copy), stored.read(words)):
            raise CheckpointError(
                f"{stored.path}: '{copy}' differs from the word embeddings, and ours are tied",
                hint="only models with tied word embeddings can be taken over; save its encoder alone with save_pretrained()",
            )


def _left_out(stored: Stored, taken: Collection[str], family: str) -> list[str]:
    """Parts of the folder that are of no use here, as poolers and other heads.

    Raises:
        CheckpointError: something of the encoder would be passed over, which changes what it computes.
    """
    known = {*taken, *_COPIES, _BIAS_COPY}
    others = sorted(name for name in stored.tensors if name not in known and not name.endswith(_BUFFERS))
    own = tuple(prefix + part for prefix in ("", f"{family}.") for part in _OWN_PARTS)
    foreign = [name for name in others if name.startswith(own)]
    if foreign:
        raise CheckpointError(
            f"{stored.path}: nothing here can hold '{foreign[0]}'{and_more(foreign)}",
            hint=f"{CONFIG_NAME} and {stored.path.name} must come from the same model",
        )
    return sorted({name.rpartition(".")[0] for name in others})
