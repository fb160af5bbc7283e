"""Write the networks of a run, or of an earlier export, as a folder that transformers loads and every command reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from discern import __version__
from discern.artifacts.export_folder import CARD_NAME, SETTINGS_NAME, check_target, publish
from discern.artifacts.huggingface import HuggingFaceFolder, weights_outside_networks
from discern.artifacts.model_folder import TEXT_LICENSE
from discern.artifacts.run import RunFolder, is_run, load_run
from discern.config.schema import to_toml
from discern.convert.cards.imported import ImportedFacts, imported_card
from discern.convert.cards.markdown import code, escaped
from discern.convert.cards.model import facts_of_run, model_card, tokenizer_kind, without_paths
from discern.convert.forms import Form, in_form
from discern.convert.onnx_graph import check_graph
from discern.convert.parity import Parity
from discern.convert.serving import Serving
from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.errors import CheckpointError, ConfigError, NumericsError, did_you_mean
from discern.interop.config_json import MARK, read_huggingface_config, read_mark, whole_number
from discern.interop.families import NETWORK_TYPES, family_in, family_of, to_huggingface
from discern.interop.huggingface import PRECISIONS, HuggingFaceModel
from discern.interop.names import CONFIG_NAME, TWO_TOWER_CLASS, UNLIMITED_POSITIONS, architecture
from discern.interop.tokenizer import (
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    TokenizerFiles,
    read_max_length,
    to_huggingface_tokenizer,
    tokenizer_files,
)
from discern.objectives.base import Vocabulary
from discern.progress import Progress
from discern.storage.checksums import read_text, understood, write_recorded
from discern.storage.files import write_file
from discern.tasks.readers.files import whole_text

_COPY = "copy the file again from where the export came from, or remove it; the new export is then written without it"


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    Attributes:
        folder: the folder.
        networks: names of the networks; the first is at the root, and the other attributes describe it.
        architecture: class of transformers that loads it.
        parameters: number of parameters; a tied matrix counts once.
        step: step of the checkpoint; None if unknown.
        num_bytes: size of the whole folder.
        parity: report of the ONNX file; None: there is none.
    """

    folder: Path
    networks: tuple[str, ...]
    architecture: str
    parameters: int
    step: int | None
    num_bytes: int
    parity: Parity | None = None


@dataclass(frozen=True)
class _Contents:
    """The content of the folder to write.

    Attributes:
        models: the networks by name; the first goes to the root.
        settings: content of discern.toml; None: no such file.
    """

    models: Mapping[str, HuggingFaceModel]
    tokenizer: TokenizerFiles
    settings: bytes | None
    card: str
    step: int | None


def export(
    source: Path,
    *,
    out: Path,
    network: str | None = None,
    all_networks: bool = False,
    precision: str = "float32",
    serving: Serving = Serving(),
    progress: Progress,
    warn: Callable[[str], None],
) -> Exported:
    """Write networks of a run or of an export, with tokenizer, settings and model card.

    Args:
        source: folder of a run, whose newest intact checkpoint is exported, or what `discern export` or `discern import` wrote.
        out: new or empty folder, or an earlier export, which is replaced as a whole.
        network: name of the network; None: the first of the objective, which is the one to fine-tune.
        all_networks: also write the other networks, each in a folder of its name, so that the export can be evaluated.
        precision: type that the weights are stored in: 'float32', 'bfloat16' or 'float16'.
        serving: further forms of the model, for those who serve it.
        warn: receives a message for every damaged checkpoint that was skipped, and one if the networks of an export that holds
            them all are not enough to evaluate it.

    Raises:
        ConfigError: there is no network of that name, transformers has no class for it, or the precision is unknown.
        DataError: `source` is not a run, or `out` holds something else or cannot be written.
        CheckpointError: the run has no intact checkpoint, or the weights of the export are missing or damaged.
        NumericsError: a weight is not finite, or too large for the precision; or eight bits lose more than is allowed.
    """
    check_target(out, source)
    serving.check()
    if serving.form is not None and all_networks:
        raise ConfigError("--all-networks writes networks for discern, --as one for other software", hint="leave out one of them")
    if precision not in PRECISIONS:
        raise ConfigError(f"unknown precision '{precision}'", hint=did_you_mean(precision, PRECISIONS))
    progress.start("exporting", 2, "parts")
    title = out.resolve().name
    if (source / CONFIG_NAME).is_file() and not is_run(source):
        contents = _from_export(source, title, network, all_networks, precision, serving.form)
    else:
        run = load_run(source, warn=warn)
        contents = _from_run(run, title, network, all_networks, precision, serving.form)
        if all_networks and (lost := weights_outside_networks(run.objective)):
            warn(f"{out} lacks weights that belong to none of the networks ({', '.join(lost[:3])}): evaluate the run instead")
    progress.advance(1)
    first = next(iter(contents.models.values()))
    if serving.onnx:
        check_graph(first.config["model_type"])
    parity: list[Parity | None] = []

    def write(folder: Path) -> None:
        write_networks(folder, contents.models, contents.tokenizer)
        if contents.settings is not None:
            write_recorded(folder, {SETTINGS_NAME: contents.settings})
        write_file(folder / CARD_NAME, contents.card.encode())
        parity.append(serving.add(folder, progress))

    publish(out, write)
    progress.advance(1)
    progress.finish()
    loads_as = first.config["architectures"][0]
    return Exported(out, tuple(contents.models), loads_as, first.num_parameters, contents.step, folder_size(out), parity[-1])


def write_networks(folder: Path, models: Mapping[str, HuggingFaceModel], tokenizer: TokenizerFiles) -> None:
    """Write the networks: the first at the root of the folder, the others in folders of their names, each with the tokenizer."""
    for number, (name, model) in enumerate(models.items()):
        path = folder / name if number else folder
        path.mkdir(exist_ok=True)
        model.write(path)
        write_recorded(path, {TOKENIZER_NAME: tokenizer.tokenizer, TOKENIZER_CONFIG_NAME: tokenizer.config})


def check_finite(model: HuggingFaceModel, source: Path) -> None:
    """Raise a NumericsError if a weight is not finite, or too large for the precision."""
    for name, tensor in (model.tensors | model.head).items():
        if not tensor.isfinite().all():
            hint = "export another run, or an earlier copy of this one"
            if model.config["dtype"] == "float16":
                hint = "the largest float16 is 65504: use --precision bfloat16; or " + hint
            raise NumericsError(f"{source}: '{name}' contains values that are not finite", hint=hint)


def folder_size(folder: Path) -> int:
    """Size of all files of a folder in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _from_run(
    run: RunFolder, title: str, network: str | None, all_networks: bool, precision: str, form: Form | None
) -> _Contents:
    networks, objective = run.objective.networks(), run.config.objective.name
    if network is not None and network not in networks:
        raise ConfigError(f"objective '{objective}' has no network '{network}'", hint=did_you_mean(network, networks))
    hint = f"leave out --network; the {network} will be in the folder '{network}'"
    names = _chosen(list(networks), network, all_networks, hint)
    _refuse_alone(names[0], architecture(networks[names[0]]))
    models = {name: to_huggingface(networks[name], run.vocabulary, precision) for name in names}
    for model in models.values():
        check_finite(model, run.folder)
    root = models[names[0]]
    root.config[MARK] = _mark(run, names) | root.config.get(MARK, {})
    if form is not None:
        models[names[0]] = in_form(root, form)
    family = family_of(networks[names[0]].encoder)
    length = run.config.data.sequence_length
    tokenizer = to_huggingface_tokenizer(run.tokenizer_path, length, family.frame, has_segments=family.has_segments)
    card = model_card(facts_of_run(run, models, title))
    is_whole = "objective" in models[names[0]].config[MARK]
    return _Contents(models, tokenizer, to_toml(without_paths(run.config)).encode() if is_whole else None, card, run.step)


def _mark(run: RunFolder, networks: list[str]) -> dict[str, object]:
    """What later commands need to know about an export, in addition to its settings. No paths and no host names."""
    return {
        "version": __version__,
        "objective": run.config.objective.name,
        "networks": networks,
        "step": run.step,
        "tokenizer_fingerprint": run.record["tokenizer_fingerprint"],
    } | {name: run.record[name] for name in ("language", TEXT_LICENSE) if name in run.record}


def _from_export(
    source: Path, title: str, network: str | None, all_networks: bool, precision: str, form: Form | None
) -> _Contents:
    config = read_huggingface_config(source, NETWORK_TYPES)
    mark = read_mark(config)
    if not mark.get("networks"):
        raise CheckpointError(
            f"{source / CONFIG_NAME} does not name the networks of an export",
            hint="export the run again; convert a model that discern did not write with `discern import`",
        )
    present = mark["networks"]
    if network is not None and network not in present:
        raise ConfigError(f"{source} has no network '{network}'", hint=did_you_mean(network, present))
    names = _chosen(present, network, all_networks, "leave out --network")
    tokenizer = load_tokenizer(source)
    models = _stored_models(source, present[0], names, tokenizer, precision)
    root = models[names[0]]
    root.config[MARK] = {key: value for key, value in mark.items() if key not in ("head", "gives")} | root.config.get(MARK, {})
    root.config[MARK] |= {"version": __version__, "networks": names}
    if form is not None:
        models[names[0]] = root = in_form(root, form)
    length = read_max_length(source, root.config.get("max_position_embeddings", UNLIMITED_POSITIONS))
    # The settings of an import were made for all of its networks; those of a run apply to each.
    keeps = ("objective" in mark or names == present) and "networks" in root.config[MARK]
    settings = read_text(source / SETTINGS_NAME, hint=_COPY).encode() if keeps and (source / SETTINGS_NAME).is_file() else None
    opened = HuggingFaceFolder(source)
    facts = ImportedFacts(
        title=title,
        origin=_origin(mark, names[0]),
        models=models,
        version=__version__,
        tokenizer=tokenizer_kind(tokenizer),
        max_length=length,
        step=mark.get("step"),
        language=opened.language,
        text_license=opened.text_license,
        source_card=whole_text(source / CARD_NAME) if (source / CARD_NAME).is_file() else "",
    )
    family = family_in(source)
    files = tokenizer_files(tokenizer, length, family.frame, has_segments=family.has_segments)
    with understood(source / CONFIG_NAME, hint="export the run again", error=CheckpointError):
        card = imported_card(facts)
    return _Contents(models, files, settings, card, mark.get("step"))


def _stored_models(
    source: Path, root: str, names: list[str], tokenizer: Tokenizer, precision: str
) -> dict[str, HuggingFaceModel]:
    """The networks of an export, each read from the root or from the folder of its name."""
    models: dict[str, HuggingFaceModel] = {}
    for name in names:
        folder = source if name == root else source / name
        config = read_huggingface_config(folder, NETWORK_TYPES)
        if name != root and name == names[0]:
            _refuse_alone(name, config["architectures"][0])
        vocabulary = Vocabulary(whole_number(config, "vocab_size", folder / CONFIG_NAME), special_tokens(tokenizer))
        models[name] = family_in(folder).again(folder, vocabulary, precision)
        check_finite(models[name], source)
    return models


def _origin(mark: Mapping[str, Any], name: str) -> str:
    """Return the origin of a network as Markdown. No paths."""
    if "imported" in mark:
        return f"the {escaped(name)} of a model that was imported: {escaped(mark['imported'])}"
    return f"the {escaped(name)} of a run of discern, objective {code(mark.get('objective'))}; see the card at the end"


def _chosen(present: list[str], network: str | None, all_networks: bool, hint: str) -> list[str]:
    """Names of the networks to write; the first goes to the root."""
    if not all_networks:
        return [network or present[0]]
    if network not in (None, present[0]):
        raise ConfigError(f"with all networks, the {present[0]} is at the root, not the {network}", hint=hint)
    return present


def _refuse_alone(name: str, loads_as: str) -> None:
    """Raise a ConfigError if transformers has no class for a network, so that it cannot be at the root."""
    if loads_as == TWO_TOWER_CLASS:
        raise ConfigError(
            f"the {name} has two towers, and transformers has no such model",
            hint="leave out --network and add --all-networks, which stores it beside the discriminator, for discern only",
        )
