"""An encoder to fine-tune: of a run, an export, any Hugging Face ELECTRA, BERT or XLNet, or one that has learned nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from discern.corruption.randomness import key_of
from discern.data.languages import LANGUAGES
from discern.data.tokenizer import load_tokenizer, vocab_size
from discern.errors import DataError
from discern.interop.config_json import read_mark
from discern.interop.families import ENCODER_TYPES, family_in
from discern.interop.folder import SETTINGS_NAME
from discern.interop.hub import hub_name
from discern.interop.tokenizer import read_max_length
from discern.model.config import ModelConfig
from discern.model.embeddings import DisentangledEmbeddings
from discern.model.encoder import Encoder, build_embeddings, build_encoder
from discern.model.initialisation import initialise
from discern.workflows.configuration import load_pretrain_config, read_written_config
from discern.workflows.models import folder_config
from discern.workflows.runs import TEXT_LICENSE, is_run, load_run


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder to fine-tune, in evaluation mode, float32, on the CPU; every parameter is its own and takes gradients.

    Attributes:
        encoder: reads ordinary embeddings.
        tokenizer_path: a file or folder that `load_tokenizer` takes; the word table has a row for each of its ids.
        vocabulary_size: rows of the word table.
        max_length: positions it was trained on, [CLS] and [SEP] included; of a model that doesn't say, those that it has.
        description: where it comes from, in words.
        source_fingerprint: sha256 over its weights.
        trained: whether it has learned anything; one that has not is drawn anew by each seed of a fine-tuning.
        language: code of the language of the text that it was trained on; None: not known.
        text_license: of that text, as whoever prepared it said; None: not known.
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


def load_encoder(folder: Path, *, warn: Callable[[str], None]) -> LoadedEncoder:
    """The encoder in a folder; of several networks that of the first, which in ELECTRA is the discriminator.

    Args:
        folder: a run, an export, or a Hugging Face ELECTRA, BERT or XLNet with any head or none.
        warn: told of damaged checkpoints that were passed over.

    Raises:
        DataError: the folder holds neither a run nor a model, or no tokenizer, or one with more entries than the model.
        CheckpointError: its weights are missing or damaged, or those of something else than an ELECTRA, BERT or XLNet.
        ConfigError: the settings of an export are damaged.
    """
    if is_run(folder):
        run = load_run(folder, warn=warn)
        encoder = next(iter(run.objective.networks().values())).encoder
        if isinstance(encoder.embeddings, DisentangledEmbeddings):
            encoder.embeddings = encoder.embeddings.merged()
        length = run.config.data.sequence_length
        found = _loaded(encoder, run.tokenizer_path, length, f"run {folder} at step {run.step:,}")
        return replace(found, language=run.record.get("language"), text_license=run.record.get(TEXT_LICENSE))
    config = folder_config(folder, ENCODER_TYPES)
    loaded = family_in(folder).encoder_from(folder)
    if "objective" in read_mark(config) and (folder / SETTINGS_NAME).is_file():
        _recall_initialisation(loaded, folder / SETTINGS_NAME)
    found = _loaded(loaded, folder, read_max_length(folder, loaded.config.max_positions), _describe(folder, config))
    language, license = read_mark(config).get("language"), read_mark(config).get(TEXT_LICENSE)
    known = license if isinstance(license, str) and license.isprintable() else None
    return replace(found, language=language if language in LANGUAGES else None, text_license=known)


def fresh_encoder(like: LoadedEncoder, seed: int) -> LoadedEncoder:
    """An encoder of the same sizes, tokenizer and settings, with the weights of step 0: what pre-training is measured against."""
    embedding_size = like.encoder.embeddings.embedding_size
    encoder = _untrained(like.encoder.config, like.vocabulary_size, embedding_size, seed)
    return _loaded(encoder, like.tokenizer_path, like.max_length, f"untrained, as {like.description}", trained=False)


def encoder_of_preset(name: str, tokenizer: Path, seed: int) -> LoadedEncoder:
    """An encoder of a preset's sizes, with the weights of step 0.

    Args:
        tokenizer: a file or folder that `load_tokenizer` takes.

    Raises:
        ConfigError: no such preset.
        DataError: the tokenizer is missing or damaged.
    """
    config = load_pretrain_config(None, name).config
    rows = vocab_size(load_tokenizer(tokenizer))
    encoder = _untrained(config.model, rows, config.model.embedding_size, seed)
    return _loaded(encoder, tokenizer, config.data.sequence_length, f"untrained, preset {name}", trained=False)


def fingerprint_weights(module: nn.Module) -> str:
    """sha256 over names, shapes and values of the parameters, which are on the CPU."""
    digest = hashlib.sha256()
    for name, value in sorted(module.named_parameters()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().contiguous().numpy().data)
    return digest.hexdigest()


def draw_weights(encoder: Encoder, seed: int) -> None:
    """Give an encoder the weights of step 0, as a function of the seed alone."""
    initialise(encoder, torch.Generator().manual_seed(key_of(seed, "weights")), encoder.config)


def _loaded(encoder: Encoder, tokenizer_path: Path, max_length: int, description: str, *, trained: bool = True) -> LoadedEncoder:
    """The encoder with what is known of it, once its tokenizer fits."""
    entries, rows = vocab_size(load_tokenizer(tokenizer_path)), encoder.embeddings.vocab_size
    if entries > rows:
        raise DataError(
            f"{tokenizer_path}: the tokenizer has {entries:,} entries, the embeddings {rows:,} rows",
            hint="put the tokenizer beside the model that it was trained with: tokenizer.json or vocab.txt of the same download",
        )
    fingerprint = fingerprint_weights(encoder)
    return LoadedEncoder(encoder.eval(), tokenizer_path, rows, max_length, description, fingerprint, trained)


def _untrained(config: ModelConfig, vocabulary_size: int, embedding_size: int, seed: int) -> Encoder:
    encoder = build_encoder(build_embeddings(vocabulary_size, embedding_size, config), config)
    draw_weights(encoder, seed)
    return encoder


def _recall_initialisation(encoder: Encoder, settings: Path) -> None:
    """Take from an export's settings how its weights began, of which config.json knows the scale alone."""
    began = read_written_config(settings).model.initialisation
    encoder.config = encoder.config.model_copy(update={"initialisation": began})


def _describe(folder: Path, config: Mapping[str, Any]) -> str:
    step = read_mark(config).get("step")
    if (name := hub_name(folder)) is not None:
        return name
    return f"Hugging Face {config['model_type']} folder {folder}" if step is None else f"export {folder} of step {step:,}"
