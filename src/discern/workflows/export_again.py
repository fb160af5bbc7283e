"""A network of an export or of an imported model as an export of its own: one of several, or in another precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from discern import __version__
from discern.artifacts.files import write_file
from discern.data.tokenizer import load_tokenizer, lowercases
from discern.errors import CheckpointError, ConfigError, did_you_mean
from discern.interop.adopted_card import AdoptedFacts, adopted_card
from discern.interop.config_json import MARK, model_config, read_huggingface_config, read_mark
from discern.interop.families import NETWORK_TYPES
from discern.interop.folder import CARD_NAME, SETTINGS_NAME, check_target, publish
from discern.interop.huggingface import PRECISIONS, HuggingFaceModel
from discern.interop.markdown import code, escaped
from discern.interop.names import CONFIG_NAME, FAMILIES
from discern.interop.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, read_max_length, tokenizer_files
from discern.progress import Progress
from discern.records import read_text, understood
from discern.workflows.export import Exported, ExportRequest, check_finite, refuse_alone, write_networks

_COPY = "copy the file again from where the export came from, or remove it; the new export then has none"


def is_export(folder: Path) -> bool:
    """Whether a folder holds networks that `discern export` or `discern import` wrote; fine-tuned ones are none."""
    return (folder / CONFIG_NAME).is_file() and bool(read_mark(read_huggingface_config(folder, NETWORK_TYPES)).get("networks"))


def export_again(request: ExportRequest, progress: Progress) -> Exported:
    """Write networks of an export, with tokenizer, settings and model card.

    Args:
        request: its `run` is the export.

    Raises:
        ConfigError: the export has no network of that name, or is of an XLNet, or no such precision exists.
        DataError: `out` holds something else or cannot be written.
        CheckpointError: the weights are missing or damaged.
        NumericsError: a weight is too large for the precision.
    """
    check_target(request.out, request.run)
    source = request.run
    progress.start("exporting", 2, "parts")
    config = read_huggingface_config(source, NETWORK_TYPES)
    if config["model_type"] not in FAMILIES:
        raise ConfigError(
            f"{source} is an export of an {config['model_type'].upper()}, and only ELECTRAs can be exported from an export",
            hint="export the run again: discern export RUN --out DIR --precision ...",
        )
    mark = read_mark(config)
    if not mark.get("networks"):
        raise CheckpointError(f"{source / CONFIG_NAME} does not name the networks of the export", hint="export the run again")
    models = _models(source, mark["networks"], request)
    (name, first), *others = models.items()
    first.config[MARK] = {key: value for key, value in mark.items() if key not in ("head", "gives")} | first.config.get(MARK, {})
    first.config[MARK] |= {"version": __version__, "networks": list(models)}
    progress.advance(1)
    tokenizer = load_tokenizer(source)
    length = read_max_length(source, first.config.get("max_position_embeddings", 512))
    # Those of an import were made for all of its networks; what a run was trained by holds for each.
    keeps = "objective" in mark or list(models) == mark["networks"]
    settings = read_text(source / SETTINGS_NAME, hint=_COPY).encode() if keeps and (source / SETTINGS_NAME).is_file() else None
    facts = AdoptedFacts(
        title=request.out.resolve().name,
        origin=_origin(mark, name),
        models=models,
        version=__version__,
        tokenizer=f"{type(tokenizer.model).__name__}, {'lower-cased' if lowercases(tokenizer) else 'cased'}",
        max_length=length,
        step=mark.get("step"),
        source_card=read_text(source / CARD_NAME, hint=_COPY) if (source / CARD_NAME).is_file() else "",
    )
    files = tokenizer_files(tokenizer, length)
    with understood(source / CONFIG_NAME, hint="export the run again", error=CheckpointError):
        card = adopted_card(facts)

    def write(folder: Path) -> None:
        write_networks(folder, first, others)
        write_file(folder / TOKENIZER_NAME, files.tokenizer)
        write_file(folder / TOKENIZER_CONFIG_NAME, files.config)
        if settings is not None:
            write_file(folder / SETTINGS_NAME, settings)
        write_file(folder / CARD_NAME, card.encode())

    publish(request.out, write)
    progress.advance(1)
    progress.finish()
    size = sum(path.stat().st_size for path in request.out.rglob("*") if path.is_file())
    return Exported(request.out, tuple(models), first.config["architectures"][0], first.num_parameters, mark.get("step"), size)


def _models(source: Path, present: list[str], request: ExportRequest) -> dict[str, HuggingFaceModel]:
    """The wanted networks by name, the one for the root first."""
    if request.precision not in PRECISIONS:
        raise ConfigError(f"unknown precision '{request.precision}'", hint=did_you_mean(request.precision, PRECISIONS))
    name = request.network or present[0]
    if name not in present:
        raise ConfigError(f"{source} holds no network '{name}'", hint=did_you_mean(name, present))
    if request.all_networks and name != present[0]:
        raise ConfigError(
            f"with all networks, the {present[0]} is the one at the root, not the {name}", hint="leave out --network"
        )
    if name != present[0]:
        beside = read_huggingface_config(source / name, FAMILIES)
        refuse_alone(name, beside["architectures"][0])
    wanted = present if request.all_networks else [name]
    folders = {each: source if each == present[0] else source / each for each in wanted}
    for folder in folders.values():
        model_config(read_huggingface_config(folder, FAMILIES), folder / CONFIG_NAME, {})  # the sizes are in order
    models = {each: HuggingFaceModel.read(folder, request.precision) for each, folder in folders.items()}
    for model in models.values():
        check_finite(model, source)
    return models


def _origin(mark: Mapping[str, Any], name: str) -> str:
    """Where a network is from, in words; no path."""
    if "imported" in mark:
        return f"the {escaped(name)} of a model that was imported: {escaped(mark['imported'])}"
    return f"the {escaped(name)} of a run of discern, objective {code(mark.get('objective'))}; see the card at the end"
