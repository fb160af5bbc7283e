"""Reads the encoder of a Hugging Face ELECTRA or BERT folder, alone or with its pre-training head.

Nothing here imports transformers. Of a pickle, only tensors are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from discern.errors import CheckpointError
from discern.interop.config_json import SUPPORTED, model_config, read_huggingface_config, whole_number
from discern.interop.names import CONFIG_NAME, encoder_weights
from discern.interop.weight_files import WeightFiles, allocate, check_names, check_shape, open_weight_files
from discern.models.base import Network
from discern.models.electra.encoder import BertEncoder
from discern.models.electra.huggingface import bert_name, to_huggingface
from discern.models.embeddings import Embeddings
from discern.models.heads import MaskedLMHead, ReplacedTokenHead

MODEL_TYPES = ("electra", "bert")
"""Values of `model_type` in config.json whose encoders are supported."""

_ENCODER_PARTS = ("embeddings.", "embeddings_project.", "encoder.")
# Buffers (0, 1, 2, ...) that some versions of transformers write.
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")


def encoder_from_huggingface(folder: Path) -> BertEncoder:
    """The encoder of a Hugging Face ELECTRA or BERT, in float32 and evaluation mode, on the CPU.

    Heads and the pooler are ignored. The weights are read from the first of these that exists: model.safetensors, the files that
    its index lists, pytorch_model.bin, the files that its index lists.

    Raises:
        CheckpointError: a file is missing or damaged, the model is of another family or uses an unsupported option, or a tensor
            of the encoder is missing, unexpected, or differs in shape from config.json.
    """
    config, path = read_huggingface_config(folder, MODEL_TYPES), folder / CONFIG_NAME
    sizes = model_config(config, path, {**SUPPORTED, "is_decoder": False, "add_cross_attention": False})
    with torch.device("meta"):
        encoder = BertEncoder(Embeddings(whole_number(config, "vocab_size", path), sizes.embedding_size, sizes), sizes)
    with open_weight_files(folder) as stored:
        _checked_names(encoder, stored, config["model_type"])
        allocate(encoder, folder)
        _fill(_checked_names(encoder, stored, config["model_type"]), stored)
    return encoder.eval()


def _checked_names(encoder: BertEncoder, stored: WeightFiles, family: str) -> dict[str, Tensor]:
    """The encoder's weights by their names in the folder, after checking that the folder has all of them."""
    # Beside a head, `electra.` or `bert.` precedes the encoder's names; an encoder saved alone has no prefix.
    prefix = f"{family}." if any(name.startswith(f"{family}.") for name in stored.tensors) else ""
    names = {prefix + name.removeprefix("electra."): weight for name, weight in encoder_weights(encoder).items()}
    parts = tuple(prefix + part for part in _ENCODER_PARTS)
    check_names(stored, names.keys(), parts, "an ELECTRA or BERT", {prefix + name for name in _BUFFERS})
    return names


@torch.no_grad()
def _fill(weights: Mapping[str, Tensor], stored: WeightFiles) -> None:
    """Copy the weights, stored in any data type."""
    for name, weight in weights.items():
        tensor = stored.read(name)
        check_shape(name, tensor.shape, weight, stored.path)
        weight.copy_(tensor)


# Names of the output matrix in folders that store it although it is tied to the word embeddings.
_OUTPUTS = ("generator_lm_head.weight", "cls.predictions.decoder.weight")


def network_with_head(folder: Path) -> Network:
    """The encoder of a folder with its pre-training head, in float32 and evaluation mode, on the CPU.

    The head is that of a discriminator or of a masked language model, or an `nn.Identity` if the folder has neither.

    Raises:
        CheckpointError: as in `encoder_from_huggingface`; or a tensor of the head differs in shape from config.json; or the
            output matrix is not tied to the word embeddings.
    """
    encoder = encoder_from_huggingface(folder)
    with open_weight_files(folder) as stored:
        words = _word_table(encoder)
        kinds: tuple[tuple[Callable[[], nn.Module], Callable[[str], str]], ...] = (
            (lambda: ReplacedTokenHead(encoder.config), str),
            (lambda: MaskedLMHead(encoder.config, words), str),
            (lambda: MaskedLMHead(encoder.config, words), bert_name),
        )
        head: nn.Module = nn.Identity()
        for build, rename in kinds:
            with torch.device("meta"):
                expected = _head_weights(build(), rename).keys()
            if expected <= stored.tensors.keys():
                head = build()
                if isinstance(head, MaskedLMHead):
                    _check_tied(encoder, stored)
                _fill(_head_weights(head, rename), stored)
    return Network(encoder, head.eval())


def _head_weights(head: nn.Module, rename: Callable[[str], str]) -> dict[str, Tensor]:
    """The parameters of a head by Hugging Face's names, without the word embeddings."""
    own = {f"head.{name}": value for name, value in head.named_parameters() if not name.startswith("word_embeddings.")}
    return {rename(name): value for name, value in to_huggingface(own).items()}


def _word_table(encoder: BertEncoder) -> nn.Embedding:
    embeddings = encoder.embeddings
    assert isinstance(embeddings, Embeddings)
    return embeddings.word


def _check_tied(encoder: BertEncoder, stored: WeightFiles) -> None:
    """Raise a CheckpointError if the output matrix differs from the word embeddings."""
    for name in _OUTPUTS:
        if name in stored.tensors and not torch.equal(stored.read(name).float(), _word_table(encoder).weight):
            raise CheckpointError(
                f"{stored.path}: '{name}' differs from the word embeddings, but only tied embeddings are supported",
                hint="training can only be continued from models with tied word embeddings",
            )
