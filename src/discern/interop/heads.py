"""A Hugging Face ELECTRA or BERT with the pre-training head that it has, if any: what one goes on training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from discern.errors import CheckpointError
from discern.interop.huggingface import check_shape
from discern.interop.pretrained import encoder_from_huggingface
from discern.interop.stored import Stored, stored_weights
from discern.model.bert import BertEncoder
from discern.model.embeddings import Embeddings
from discern.model.heads import MaskedLMHead, ReplacedTokenHead
from discern.model.network import Network

# Our name -> theirs.
_DISCRIMINATOR = {
    "dense.weight": "discriminator_predictions.dense.weight",
    "dense.bias": "discriminator_predictions.dense.bias",
    "output.weight": "discriminator_predictions.dense_prediction.weight",
    "output.bias": "discriminator_predictions.dense_prediction.bias",
}
_GENERATOR = {
    "dense.weight": "generator_predictions.dense.weight",
    "dense.bias": "generator_predictions.dense.bias",
    "norm.weight": "generator_predictions.LayerNorm.weight",
    "norm.bias": "generator_predictions.LayerNorm.bias",
    "bias": "generator_lm_head.bias",
}
_BERT = {
    "dense.weight": "cls.predictions.transform.dense.weight",
    "dense.bias": "cls.predictions.transform.dense.bias",
    "norm.weight": "cls.predictions.transform.LayerNorm.weight",
    "norm.bias": "cls.predictions.transform.LayerNorm.bias",
    "bias": "cls.predictions.bias",
}
# The output matrix, where it is stored although it is the word table.
_OUTPUTS = ("generator_lm_head.weight", "cls.predictions.decoder.weight")


def network_with_head(folder: Path) -> Network:
    """The encoder of a folder with its pre-training head, in float32 and evaluation mode, on the CPU.

    The head is a discriminator's, a masked language model's, or, where the folder has neither, an `nn.Identity`.

    Raises:
        CheckpointError: as of `encoder_from_huggingface`; or a tensor of the head has another shape than config.json says; or
            the output matrix is not the word table.
    """
    encoder = encoder_from_huggingface(folder)
    with stored_weights(folder) as stored:
        head: nn.Module = nn.Identity()
        if set(_DISCRIMINATOR.values()) <= stored.tensors.keys():
            head = _filled(ReplacedTokenHead(encoder.config), _DISCRIMINATOR, stored)
        for names in (_GENERATOR, _BERT):
            if set(names.values()) <= stored.tensors.keys():
                _check_tied(encoder, stored)
                head = _filled(MaskedLMHead(encoder.config, _word_table(encoder)), names, stored)
    return Network(encoder, head.eval())


@torch.no_grad()
def _filled(head: nn.Module, names: Mapping[str, str], stored: Stored) -> nn.Module:
    parameters = dict(head.named_parameters())
    for ours, theirs in names.items():
        tensor = stored.read(theirs)
        check_shape(theirs, tensor.shape, parameters[ours], stored.path)
        parameters[ours].copy_(tensor)
    return head


def _word_table(encoder: BertEncoder) -> nn.Embedding:
    embeddings = encoder.embeddings
    assert isinstance(embeddings, Embeddings)
    return embeddings.word


def _check_tied(encoder: BertEncoder, stored: Stored) -> None:
    """Raise a CheckpointError where words are written by another matrix than they are read by."""
    for name in _OUTPUTS:
        if name in stored.tensors and not torch.equal(stored.read(name).float(), _word_table(encoder).weight):
            raise CheckpointError(
                f"{stored.path}: '{name}' differs from the word embeddings, and ours are tied",
                hint="training can only be continued from models with tied word embeddings",
            )
