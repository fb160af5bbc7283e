"""Import a model from Hugging Face or from the released TensorFlow code, as a folder that every command reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from discern import __version__
from discern.config.schema import flatten, to_toml
from discern.data.tokenizer import fingerprint, special_tokens
from discern.errors import ConfigError, DataError
from discern.model_files.cards import imported_card
from discern.model_files.export import check_finite, check_target, publish, write_networks
from discern.model_files.folder import PROVENANCE, Provenance, check_rows, holds_model, open_model
from discern.model_files.hub import CONFIG_NAME, hub_name
from discern.model_files.huggingface import HuggingFaceFolder, HuggingFaceModel, network_to_huggingface
from discern.model_files.tensorflow import KIND, find_checkpoint, read_released
from discern.model_files.tokenizer import FoundTokenizer, find_tokenizer, read_max_length, tokenizer_files
from discern.models.architecture import MARK, WORDS
from discern.models.base import encoders_by_type
from discern.models.config import ModelConfig
from discern.progress import Progress
from discern.training.config import PretrainConfig, load_pretrain_config


@dataclass(frozen=True)
class ImportedModel:
    """Networks imported from another library.

    Attributes:
        kind: kind of source, in words.
        models: the networks by name: 'discriminator' and 'generator', or 'encoder'. The first one is the one to fine-tune.
        tokenizer: their tokenizer.
        step: number of training steps; None if unknown.
        max_length: maximum sequence length in tokens; None if unknown.
        left_out: names of the parts of the source that were not imported.
        remarks: notes for the user.
        provenance: see `Provenance`.
    """

    kind: str
    models: Mapping[str, HuggingFaceModel]
    tokenizer: FoundTokenizer
    step: int | None = None
    max_length: int | None = None
    left_out: Sequence[str] = ()
    remarks: Sequence[str] = ()
    provenance: Provenance = field(default_factory=dict)


@dataclass(frozen=True)
class Imported:
    """What `import_model` wrote.

    Attributes:
        folder: the folder.
        model: the networks, and what was left out.
        measurable: whether `discern evaluate` accepts the folder.
        num_bytes: size of the whole folder.
    """

    folder: Path
    model: ImportedModel
    measurable: bool
    num_bytes: int

    def values(self) -> dict[str, Any]:
        """What was written, as `--json` prints it."""
        models, first = self.model.models, next(iter(self.model.models.values()))
        return {
            "out": self.folder,
            "kind": self.model.kind,
            "networks": list(models),
            "architecture": first.loads_as,
            "parameters": {name: model.num_parameters for name, model in models.items()},
            "vocab_size": first.config["vocab_size"],
            "tokenizer": self.model.tokenizer.manner,
            "step": self.model.step,
            "left_out": self.model.left_out,
            "remarks": self.model.remarks,
            "measurable": self.measurable,
            "bytes": self.num_bytes,
        }


def import_model(
    sources: Sequence[Path],
    *,
    out: Path,
    tokenizer: Path | None = None,
    lowercase: bool | None = None,
    heads: int | None = None,
    progress: Progress,
    warn: Callable[[str], None],
) -> Imported:
    """Import a model: its weights, its tokenizer, and settings to evaluate it with where they can be derived.

    Args:
        sources: a Hugging Face folder, or two, the discriminator and the generator of one model in any order; or a checkpoint
            of the released TensorFlow code: one of its files, their common prefix, or the folder that holds them.
        out: new or empty folder, or an earlier export or import, which is replaced as a whole.
        tokenizer: a path that `load_tokenizer` accepts; None: the one beside the weights.
        lowercase: whether texts are lower-cased; None: taken from the files, or else guessed from the vocabulary.
        heads: attention heads of a TensorFlow discriminator; None: one per 64 units of the hidden size.
        warn: receives a message for everything that was guessed.

    Raises:
        ConfigError: a source cannot be imported, or the sources are not one model.
        DataError: the tokenizer is missing or belongs to another model; or `out` holds something else or cannot be written.
        CheckpointError: a file is missing or damaged, could run code, or belongs to another kind of model.
        NumericsError: a weight is not finite.
    """
    check_target(out, *sources)
    if not 1 <= len(sources) <= 2:
        raise ConfigError(
            f"{len(sources)} sources were specified",
            hint="specify one source, or two: a discriminator and its generator from Hugging Face",
        )
    progress.start("importing", None, "")
    read = [_read_source(source, tokenizer, lowercase, heads, warn) for source in sources]
    progress.finish()
    imported = read[0] if len(read) == 1 else _join(read, sources)
    found = imported.tokenizer
    if found.judged:
        remark = f"the texts are {found.manner}; set --lowercase or --cased to override this"
        imported = replace(imported, remarks=[*imported.remarks, remark])
    config = settings_for(imported.models)
    if config is None and "discriminator" in imported.models and "generator" in imported.models:
        warn(
            "discern has no setting for how these two networks share weights, so `discern evaluate` cannot evaluate them together"
        )
    for remark in imported.remarks:
        warn(remark)
    first = next(iter(imported.models.values()))
    architecture, positions = first.kind.architecture, min(model.sizes.max_positions for model in imported.models.values())
    length = min(imported.max_length or positions, positions)
    # What later commands need to know about an import, in addition to its settings. No paths and no host names.
    step = {} if imported.step is None else {"step": imported.step}
    first.config[MARK] = {
        "version": __version__,
        "imported": imported.kind,
        "networks": list(imported.models),
        "tokenizer_fingerprint": fingerprint(found.tokenizer),
        PROVENANCE: imported.provenance,
    } | step
    card = imported_card(
        imported.models,
        title=out.resolve().name,
        origin=f"a {imported.kind}",
        tokenizer=f"{type(found.tokenizer.model).__name__}, {found.manner}",
        max_length=length,
        step=imported.step,
        provenance=imported.provenance,
        settings=config is not None,
        left_out=imported.left_out,
        remarks=imported.remarks,
    )
    files, settings = tokenizer_files(found.tokenizer, length, architecture), None if config is None else to_toml(config).encode()
    size = publish(out, lambda folder: write_networks(folder, imported.models, files, card, settings))
    return Imported(out, imported, config is not None, size)


def _read_source(
    source: Path, tokenizer: Path | None, lowercase: bool | None, heads: int | None, warn: Callable[[str], None]
) -> ImportedModel:
    """The networks and the tokenizer of one source."""
    if holds_model(source):
        opened = open_model(source, warn=warn)
        if not isinstance(opened, HuggingFaceFolder) or opened.mark:
            raise ConfigError(
                f"{source} was written by discern; the other commands accept it without an import",
                hint=f"use it as it is, for example: discern finetune {hub_name(source) or source} --train FILE.csv --out TUNED",
            )
        if heads is not None:
            raise ConfigError(
                f"--heads is for TensorFlow checkpoints; {source / CONFIG_NAME} states the number here", hint="leave it out"
            )
        found = find_tokenizer(source, tokenizer, lowercase)
        opened.tokenizer = found.tokenizer
        special, model_type = special_tokens(found.tokenizer), opened.config_json["model_type"]
        imported = ImportedModel(
            f"Hugging Face {opened.architecture.titles.get(model_type, model_type)}",
            {name: network_to_huggingface(network, special) for name, network in opened.networks_to_train.items()},
            found,
            max_length=read_max_length(source, opened.sizes.max_positions),
            left_out=opened.stored.left_out,
            provenance=opened.provenance,
        )
    elif (prefix := find_checkpoint(source)) is not None:
        found = find_tokenizer(prefix, tokenizer, lowercase)
        imported = ImportedModel(KIND, tokenizer=found, **read_released(prefix, special_tokens(found.tokenizer), heads))
    else:
        lacks = f"contains neither {CONFIG_NAME} nor the .index of a TensorFlow checkpoint"
        state = lacks if source.is_dir() else "is no model" if source.exists() else "does not exist"
        titles = ", ".join({title: None for kind in encoders_by_type().values() for title in kind.architecture.titles.values()})
        raise DataError(
            f"{source} {state}",
            hint=f"specify a folder that save_pretrained() wrote, of one of: {titles}; or the model.ckpt-N.index of the released "
            "ELECTRA code",
        )
    for model in imported.models.values():
        check_finite(model, source)
        check_rows(found.tokenizer, model.config["vocab_size"], tokenizer or source)
    return imported


def _join(read: Sequence[ImportedModel], sources: Sequence[Path]) -> ImportedModel:
    """Combine a discriminator and a generator that come from two folders, in either order."""
    one, other = read
    if sorted([*one.models, *other.models]) != ["discriminator", "generator"]:
        raise ConfigError(
            f"{sources[0]} contains the {' and '.join(one.models)}, {sources[1]} the {' and '.join(other.models)}; two sources "
            "must be the discriminator and the generator of one model",
            hint="import each separately, or specify the two that were trained together",
        )
    if one.tokenizer.tokenizer.get_vocab() != other.tokenizer.tokenizer.get_vocab():
        raise DataError(
            f"{sources[0]} and {sources[1]} have different vocabularies, so they do not belong to one model",
            hint="specify the discriminator and the generator that were trained together",
        )
    first, second = (one, other) if "discriminator" in one.models else (other, one)
    return replace(
        first,
        models={**first.models, **second.models},
        tokenizer=one.tokenizer,
        left_out=[*first.left_out, *second.left_out],
        remarks=[*first.remarks, *second.remarks],
    )


def settings_for(models: Mapping[str, HuggingFaceModel]) -> PretrainConfig | None:
    """Derive the settings of an objective with exactly these networks, to evaluate them with.

    Settings that the weights do not determine, such as the fraction of masked tokens, are those of a recipe for the hidden size.

    Returns:
        None if a network is missing, or if no setting describes what the two networks share.
    """
    first = next(iter(models.values()))
    if set(models) == {"encoder"}:
        return _recipe(first, first.sizes, first.kind.architecture.objective) if first.output == "words" else None
    if set(models) != {"discriminator", "generator"}:
        return None
    model, small = models["discriminator"].sizes, models["generator"].sizes
    width, depth = small.hidden_size / model.hidden_size, small.num_layers / model.num_layers
    if width > 1 or depth > 1:
        return None

    # What the two share: the encoder, its embeddings, the word embeddings, or nothing
    one, other = models["discriminator"].tensors, models["generator"].tensors

    def same(start: str) -> bool:
        names = {name for name in {**one, **other} if name.startswith(start)}
        return all(name in one and name in other and torch.equal(one[name], other[name]) for name in names)

    prefix, words = first.kind.architecture.prefixes[0], first.kind.architecture.named(WORDS)
    starts = {"all": prefix, "embeddings": f"{words.partition('embeddings.')[0]}embeddings.", "token": words}
    differing = first.kind.architecture.detection.get("objective.tying", "none")
    tying = next((name for name, start in starts.items() if same(start)), differing)
    expected, own_width = model.shrunk(width, depth), small.hidden_size if tying == "none" else model.embedding_size
    if expected.model_copy(update={"embedding_size": own_width}) != small:
        return None
    shares = {"objective.tying": tying, "objective.generator_size": width, "objective.generator_depth": depth}
    return _recipe(first, model, shares)


def _recipe(imported: HuggingFaceModel, model: ModelConfig, chosen: Mapping[str, object]) -> PretrainConfig | None:
    """The recipe whose hidden size is nearest, with the sizes of the model; None if there is no recipe."""
    recipes = imported.kind.architecture.recipes
    if not recipes:
        return None
    recipe = recipes[min(recipes, key=lambda width: abs(width - model.hidden_size))]
    values = {f"model.{name}": value for name, value in flatten(model).items()} | dict(chosen)
    return load_pretrain_config(None, recipe, [f"{key}={value}" for key, value in values.items()]).config
