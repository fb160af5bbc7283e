"""Import a model from Hugging Face or from the released TensorFlow code, as a folder that every command reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from discern import __version__
from discern.artifacts.export_folder import CARD_NAME, SETTINGS_NAME, check_target, publish
from discern.artifacts.run import is_run
from discern.config.schema import flatten, to_toml
from discern.convert.cards.imported import ImportedFacts, imported_card
from discern.convert.export import check_finite, folder_size, write_networks
from discern.data.tokenizer import fingerprint, special_tokens
from discern.errors import ConfigError, DataError
from discern.interop.config_json import MARK, read_huggingface_config, read_mark
from discern.interop.families import ENCODER_TYPES, FAMILIES
from discern.interop.imported_model import ImportedModel, read_huggingface, read_modernbert, read_xlnet, shared
from discern.interop.names import CONFIG_NAME, GENERATOR_CLASS, MODERNBERT_LM_CLASS, XLNET_CLASS
from discern.interop.tensorflow.bundle import find_checkpoint
from discern.interop.tensorflow.electra import read_released
from discern.interop.tokenizer import tokenizer_files
from discern.interop.vocabulary import FoundTokenizer, check_fits, find_tokenizer
from discern.models.config import ModelConfig
from discern.objectives.base import Vocabulary
from discern.progress import Progress
from discern.storage.files import write_file
from discern.training.pretrain_config import PretrainConfig, load_pretrain_config

_WHAT = (
    "specify a folder that save_pretrained() wrote, of an ELECTRA, a BERT, an XLNet or a ModernBERT, or the model.ckpt-N.index "
    "of the released ELECTRA code"
)
# The recipes of the released code, by the hidden size that they are for.
_RECIPES = {256: "electra-small-google", 768: "electra-base-google", 1024: "electra-large"}
_MODERN_RECIPES = {256: "modern-small", 768: "modern-base"}
_XLNET_RECIPES = {256: "xlnet-small", 768: "xlnet-base", 1024: "xlnet-large"}


@dataclass(frozen=True)
class Imported:
    """What `import_model` wrote.

    Attributes:
        folder: the folder.
        model: the networks, and what was left out.
        tokenizer: casing of the tokenizer, as text.
        measurable: whether `discern evaluate` accepts the folder.
        num_bytes: size of the whole folder.
    """

    folder: Path
    model: ImportedModel
    tokenizer: str
    measurable: bool
    num_bytes: int


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
        tokenizer: a tokenizer.json, a vocab.txt, or a folder with either; None: the one beside the weights.
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
    read = [_read_source(source, tokenizer, lowercase, heads, progress) for source in sources]
    found = read[0][1]
    imported = read[0][0] if len(read) == 1 else _join(read, sources)
    for source, (each, _) in zip(sources, read, strict=True):
        for model in each.models.values():
            check_finite(model, source)
    if found.judged:
        remark = f"the texts are {found.manner}; set --lowercase or --cased to override this"
        imported = replace(imported, remarks=[*imported.remarks, remark])
    config = settings_for(imported)
    if config is None and "discriminator" in imported.models and "generator" in imported.models:
        warn(
            "discern has no setting for how these two networks share weights, so `discern evaluate` cannot evaluate them together"
        )
    for remark in imported.remarks:
        warn(remark)
    _write(out, imported, found, config)
    return Imported(out, imported, found.manner, config is not None, folder_size(out))


def _read_source(
    source: Path, tokenizer: Path | None, lowercase: bool | None, heads: int | None, progress: Progress
) -> tuple[ImportedModel, FoundTokenizer]:
    """Return the networks and the tokenizer of one source."""
    if not source.exists() and find_checkpoint(source) is None:
        raise DataError(f"{source} does not exist", hint=_WHAT)
    if source.is_dir() and is_run(source):
        raise ConfigError(
            f"{source} is a run of discern, which the other commands accept without an import",
            hint=f"discern export {source} --out DIR",
        )
    if source.is_dir() and (source / CONFIG_NAME).is_file():
        config = read_huggingface_config(source, ENCODER_TYPES)
        if read_mark(config):
            raise ConfigError(
                f"{source} is an export of discern, which the other commands accept without an import",
                hint=f"discern export {source} --out DIR",
            )
        if heads is not None:
            raise ConfigError(
                f"--heads is for TensorFlow checkpoints; {source / CONFIG_NAME} states the number here",
                hint="leave it out",
            )
        found = find_tokenizer(source, tokenizer, lowercase)
        read = {"xlnet": read_xlnet, "modernbert": read_modernbert}.get(config["model_type"], read_huggingface)
        imported = read(source, _vocabulary(found))
    elif (prefix := find_checkpoint(source)) is not None:
        found = find_tokenizer(prefix, tokenizer, lowercase)
        imported = read_released(prefix, _vocabulary(found), heads, progress)
    else:
        what = "neither a folder nor a file of a TensorFlow checkpoint" if source.is_file() else "not a model: "
        lacking = "" if source.is_file() else f"it contains neither {CONFIG_NAME} nor the .index of a TensorFlow checkpoint"
        raise DataError(f"{source} is {what}{lacking}", hint=_WHAT)
    for model in imported.models.values():
        check_fits(found.tokenizer, model.config["vocab_size"], str(tokenizer or source))
    return imported, found


def _vocabulary(found: FoundTokenizer) -> Vocabulary:
    size = max(found.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return Vocabulary(size, special_tokens(found.tokenizer))


def _join(read: Sequence[tuple[ImportedModel, FoundTokenizer]], sources: Sequence[Path]) -> ImportedModel:
    """Combine a discriminator and a generator that come from two folders, in either order."""
    (one, its_tokenizer), (other, other_tokenizer) = read
    names = [*one.models, *other.models]
    if sorted(names) != ["discriminator", "generator"]:
        raise ConfigError(
            f"{sources[0]} contains the {' and '.join(one.models)}, {sources[1]} the {' and '.join(other.models)}; two sources "
            "must be the discriminator and the generator of one model",
            hint="import each separately, or specify the two that were trained together",
        )
    if its_tokenizer.tokenizer.get_vocab() != other_tokenizer.tokenizer.get_vocab():
        raise DataError(
            f"{sources[0]} and {sources[1]} have different vocabularies, so they do not belong to one model",
            hint="specify the discriminator and the generator that were trained together",
        )
    first, second = (one, other) if "discriminator" in one.models else (other, one)
    return replace(
        first,
        models={**first.models, **second.models},
        sizes={**first.sizes, **second.sizes},
        left_out=[*first.left_out, *second.left_out],
        remarks=[*first.remarks, *second.remarks],
    )


def settings_for(imported: ImportedModel) -> PretrainConfig | None:
    """Derive the settings of an objective with exactly these networks, to evaluate them with.

    Settings that the weights do not determine, such as the fraction of masked tokens, are those of the released code's recipe
    for the hidden size.

    Returns:
        None if a network is missing, or if no setting describes what the two networks share.
    """
    sizes = imported.sizes
    if set(sizes) == {"encoder"}:
        (architecture,) = imported.models["encoder"].config["architectures"]
        if architecture == XLNET_CLASS:
            return _recipe(sizes["encoder"], {}, _XLNET_RECIPES)
        if architecture == MODERNBERT_LM_CLASS:
            return _recipe(sizes["encoder"], {"objective.name": "mlm"}, _MODERN_RECIPES)
        return _recipe(sizes["encoder"], {"objective.name": "mlm"}) if architecture == GENERATOR_CLASS else None
    if set(sizes) != {"discriminator", "generator"}:
        return None
    model, small = sizes["discriminator"], sizes["generator"]
    width, depth = small.hidden_size / model.hidden_size, small.num_layers / model.num_layers
    if width > 1 or depth > 1:
        return None
    tying = shared(imported.models["discriminator"], imported.models["generator"])
    expected = model.shrunk(width, depth)
    own_width = small.hidden_size if tying == "none" else model.embedding_size
    if expected.model_copy(update={"embedding_size": own_width}) != small:
        return None
    return _recipe(model, {"objective.tying": tying, "objective.generator_size": width, "objective.generator_depth": depth})


def _recipe(model: ModelConfig, chosen: Mapping[str, object], recipes: Mapping[int, str] = _RECIPES) -> PretrainConfig:
    """Return the recipe whose hidden size is nearest, with the sizes of the model."""
    recipe = recipes[min(recipes, key=lambda width: abs(width - model.hidden_size))]
    values = {f"model.{name}": value for name, value in flatten(model).items()} | dict(chosen)
    overrides = [f"{key}={value}" for key, value in values.items()]
    return load_pretrain_config(None, recipe, overrides).config


def _write(out: Path, imported: ImportedModel, found: FoundTokenizer, config: PretrainConfig | None) -> None:
    first = next(iter(imported.models.values()))
    positions = first.config.get("max_position_embeddings")  # absent for an XLNet, whose source names the length
    length = min(known for known in (imported.max_length, positions) if known)
    first.config[MARK] = _mark(imported, fingerprint(found.tokenizer))
    facts = ImportedFacts(
        title=out.resolve().name,
        origin=imported.kind,
        models=imported.models,
        version=__version__,
        tokenizer=f"{type(found.tokenizer.model).__name__}, {found.manner}",
        max_length=length,
        step=imported.step,
        settings=config is not None,
        left_out=imported.left_out,
        remarks=imported.remarks,
    )
    family = next(family for family in FAMILIES if first.config["model_type"] in family.model_types)
    files = tokenizer_files(found.tokenizer, length, family.frame, has_segments=family.has_segments)
    card = imported_card(facts)

    def write(folder: Path) -> None:
        write_networks(folder, imported.models, files)
        if config is not None:
            write_file(folder / SETTINGS_NAME, to_toml(config).encode())
        write_file(folder / CARD_NAME, card.encode())

    publish(out, write)


def _mark(imported: ImportedModel, tokenizer: str) -> dict[str, object]:
    """What later commands need to know about an import, in addition to its settings. No paths and no host names."""
    mark: dict[str, object] = {
        "version": __version__,
        "imported": imported.kind,
        "networks": list(imported.models),
        "tokenizer_fingerprint": tokenizer,
    }
    if imported.step is not None:
        mark["step"] = imported.step
    return mark
