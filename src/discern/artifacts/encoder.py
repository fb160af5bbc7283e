"""An encoder to fine-tune, and encoders with the weights of step 0 to compare it with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from discern.corruption.randomness import key_of
from discern.data.tokenizer import load_tokenizer, vocab_size
from discern.errors import ConfigError, DataError
from discern.models.base import Encoder, build_embeddings, build_encoder
from discern.models.config import ModelConfig
from discern.models.initialization import initialize
from discern.training.pretrain_config import load_pretrain_config


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder to fine-tune, in evaluation mode, float32, on the CPU. Its parameters are not shared and require gradients.

    Attributes:
        encoder: the network, with ordinary embeddings.
        tokenizer_path: a file or folder that `load_tokenizer` accepts; the embedding table has a row for each of its ids.
        vocabulary_size: number of rows of the embedding table.
        max_length: the longest sequence it was trained on, in tokens, [CLS] and [SEP] included; if unknown, the longest that
            it can take.
        description: the origin of the weights, in words.
        source_fingerprint: SHA-256 of the weights.
        trained: whether the encoder has been trained; if not, each fine-tuning seed draws its own weights.
        language: code of the language of the training text; None if unknown.
        text_license: license of that text, as stated by whoever prepared it; None if unknown.
    """

    encoder: Encoder
    tokenizer_path: Path
    vocabulary_size: int
    max_length: int
    description: str
    source_fingerprint: str
    trained: bool = True
    language: str | None = None
    text_license: str | None = None


def loaded_encoder(
    encoder: Encoder,
    tokenizer_path: Path,
    max_length: int,
    description: str,
    *,
    trained: bool = True,
    language: str | None = None,
    text_license: str | None = None,
) -> LoadedEncoder:
    """An encoder with its tokenizer; see `LoadedEncoder` for the arguments.

    Raises:
        DataError: the tokenizer is missing or damaged, or has more entries than the embedding table has rows.
    """
    rows = encoder.embeddings.vocab_size
    check_rows(load_tokenizer(tokenizer_path), rows, tokenizer_path)
    return LoadedEncoder(
        encoder=encoder.eval(),
        tokenizer_path=tokenizer_path,
        vocabulary_size=rows,
        max_length=max_length,
        description=description,
        source_fingerprint=fingerprint_weights(encoder),
        trained=trained,
        language=language,
        text_license=text_license,
    )


def fresh_encoder(like: LoadedEncoder, seed: int) -> LoadedEncoder:
    """An encoder of the same sizes, tokenizer and settings with the weights of step 0, the baseline of pre-training."""
    embedding_size = like.encoder.embeddings.embedding_size
    encoder = _untrained(like.encoder.config, like.vocabulary_size, embedding_size, seed)
    return loaded_encoder(encoder, like.tokenizer_path, like.max_length, f"untrained, as {like.description}", trained=False)


def check_layers(loaded: LoadedEncoder, count: int) -> None:
    """Raise a ConfigError if the encoder has fewer layers than `count`."""
    if count > loaded.encoder.config.num_layers:
        raise ConfigError(
            f"finetune.layers is {count}, but the encoder has {loaded.encoder.config.num_layers}",
            hint="give fewer, or leave it out",
        )


def first_layers(loaded: LoadedEncoder, count: int) -> LoadedEncoder:
    """The encoder without the layers after the first `count`.

    Raises:
        ConfigError: it has fewer layers.
    """
    whole = loaded.encoder
    check_layers(loaded, count)
    config = whole.config.model_copy(update={"num_layers": count})
    encoder = build_encoder(build_embeddings(loaded.vocabulary_size, whole.embeddings.embedding_size, config), config)
    weights = whole.state_dict()
    encoder.load_state_dict({name: weights[name] for name in encoder.state_dict()})
    described = f"the first {count} of {whole.config.num_layers} layers of {loaded.description}"
    return replace(loaded, encoder=encoder.eval(), description=described, source_fingerprint=fingerprint_weights(encoder))


def encoder_of_preset(name: str, tokenizer: Path, seed: int) -> LoadedEncoder:
    """An encoder of a preset's sizes, with the weights of step 0.

    Args:
        tokenizer: a file or folder that `load_tokenizer` accepts.

    Raises:
        ConfigError: there is no such preset.
        DataError: the tokenizer is missing or damaged.
    """
    config = load_pretrain_config(None, name).config
    rows = vocab_size(load_tokenizer(tokenizer))
    encoder = _untrained(config.model, rows, config.model.embedding_size, seed)
    return loaded_encoder(encoder, tokenizer, config.data.sequence_length, f"untrained, preset {name}", trained=False)


def fingerprint_weights(module: nn.Module) -> str:
    """SHA-256 of the names, shapes and values of the parameters."""
    digest = hashlib.sha256()
    for name, value in sorted(module.named_parameters()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def draw_weights(encoder: Encoder, seed: int) -> None:
    """Give an encoder the weights of step 0, as a function of the seed alone."""
    initialize(encoder, torch.Generator().manual_seed(key_of(seed, "weights")), encoder.config)


def check_rows(tokenizer: Tokenizer, rows: int, place: Path) -> None:
    """Make sure that the embedding table has a row for each id of the tokenizer.

    Args:
        rows: number of rows of the embedding table.
        place: path of the tokenizer, for the message.

    Raises:
        DataError: the table has fewer rows, so the tokenizer belongs to another model.
    """
    entries = vocab_size(tokenizer)
    if entries > rows:
        raise DataError(
            f"{place}: the tokenizer has {entries:,} entries, but the embeddings have only {rows:,} rows",
            hint="put the tokenizer beside the model that it was trained with: tokenizer.json or vocab.txt of the same download",
        )


def _untrained(config: ModelConfig, vocabulary_size: int, embedding_size: int, seed: int) -> Encoder:
    encoder = build_encoder(build_embeddings(vocabulary_size, embedding_size, config), config)
    draw_weights(encoder, seed)
    return encoder
