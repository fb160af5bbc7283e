"""The encoder of any Hugging Face ELECTRA or BERT folder, whatever heads stand on it, to be fine-tuned or gone on with.

Nothing here imports transformers, and a pickle is read only as far as it holds tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from discern.interop.allocation import allocate
from discern.interop.config_json import SUPPORTED, model_config, read_huggingface_config, whole_number
from discern.interop.huggingface import check_shape
from discern.interop.names import CONFIG_NAME, encoder_names, encoder_parameters
from discern.interop.stored import Stored, check_names, stored_weights
from discern.model.bert import BertEncoder
from discern.model.embeddings import Embeddings

FAMILIES = ("electra", "bert")
"""Values of `model_type` in config.json whose encoder this is."""

_ENCODER_PARTS = ("embeddings.", "embeddings_project.", "encoder.")
# Counting buffers that some versions of transformers write.
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")


def encoder_from_huggingface(folder: Path) -> BertEncoder:
    """The encoder of a Hugging Face ELECTRA or BERT, in float32 and evaluation mode, on the CPU.

    Heads and the pooler are passed over. The weights stand in model.safetensors, in the files that its index names, in
    pytorch_model.bin, or in the files that its index names, the first of these that is there.

    Raises:
        CheckpointError: a file is missing or damaged, the model is of another family or has an option that ours has not, or a
            tensor of the encoder is missing, is left over, or has another shape than config.json says.
    """
    config, path = read_huggingface_config(folder, FAMILIES), folder / CONFIG_NAME
    sizes = model_config(config, path, {**SUPPORTED, "is_decoder": False, "add_cross_attention": False})
    with torch.device("meta"):
        encoder = BertEncoder(Embeddings(whole_number(config, "vocab_size", path), sizes.embedding_size, sizes), sizes)
    with stored_weights(folder) as stored:
        names = _checked_names(encoder, stored, config["model_type"])
        allocate(encoder, folder)
        _fill(encoder, stored, names)
    return encoder.eval()


def _checked_names(encoder: BertEncoder, stored: Stored, family: str) -> dict[str, str]:
    """What the folder calls each of the encoder's weights; all of them are there before memory is taken for any."""
    # Beside a head stand `electra.` or `bert.` before the encoder's names; an encoder saved alone has nothing there.
    prefix = f"{family}." if any(name.startswith(f"{family}.") for name in stored.tensors) else ""
    names = {ours: prefix + theirs for ours, theirs in encoder_names(encoder).items()}
    parts = tuple(prefix + part for part in _ENCODER_PARTS)
    check_names(stored, set(names.values()), parts, "an ELECTRA or BERT", {prefix + name for name in _BUFFERS})
    return names


@torch.no_grad()
def _fill(encoder: BertEncoder, stored: Stored, names: Mapping[str, str]) -> None:
    """Copy the encoder's weights, whatever type they are stored in."""
    for ours, parameter in encoder_parameters(encoder).items():
        tensor = stored.read(names[ours])
        check_shape(names[ours], tensor.shape, parameter, stored.path)
        parameter.copy_(tensor)
