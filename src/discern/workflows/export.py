"""The networks of a run as a folder that transformers loads, and that discern measures and judges with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from discern import __version__
from discern.artifacts.files import sync_folder, write_file
from discern.config.tree import to_toml
from discern.errors import ConfigError, NumericsError, did_you_mean
from discern.interop.config_json import MARK
from discern.interop.families import family_of, to_huggingface
from discern.interop.folder import CARD_NAME, SETTINGS_NAME, check_target, publish
from discern.interop.huggingface import PRECISIONS, HuggingFaceModel
from discern.interop.model_card import model_card
from discern.interop.names import TWO_TOWER_CLASS, architecture
from discern.interop.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, to_huggingface_tokenizer
from discern.progress import Progress
from discern.workflows.card import card_facts
from discern.workflows.runs import TEXT_LICENSE, LoadedRun, load_run


@dataclass(frozen=True)
class ExportRequest:
    """What to export, and where to.

    Attributes:
        run: folder of the run; its newest sound checkpoint is taken.
        out: new or empty folder, or an earlier export, which is replaced as a whole.
        network: name among the objective's networks; None: the first, which is what one fine-tunes.
        all_networks: the others too, each in a folder of its name inside `out`, so that the export can be evaluated.
        precision: type that the weights are stored in: 'float32', 'bfloat16' or 'float16'.
    """

    run: Path
    out: Path
    network: str | None = None
    all_networks: bool = False
    precision: str = "float32"


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: where.
        networks: which of the objective's networks; the first is the one at the root, and the rest of this is about it.
        architecture: class of transformers that loads it.
        parameters: how many, the tied matrix counted once.
        step: of the checkpoint; None where nobody knows.
        num_bytes: size of the whole folder.
    """

    folder: Path
    networks: tuple[str, ...]
    architecture: str
    parameters: int
    step: int | None
    num_bytes: int


def export(request: ExportRequest, progress: Progress, warn: Callable[[str], None]) -> Exported:
    """Write networks of a run, with tokenizer, settings and model card.

    Args:
        warn: told of damaged checkpoints that were passed over.

    Raises:
        ConfigError: the objective has no network of that name, or a network has no form in transformers.
        DataError: `run` is no run, or `out` holds something else or cannot be written.
        CheckpointError: the run has no sound checkpoint.
        NumericsError: a weight is not finite, or too large for the precision.
    """
    check_target(request.out, request.run)
    progress.start("exporting", 3, "parts")
    run = load_run(request.run, warn=warn)
    models = _models(run, request)
    (_, first), *others = models.items()
    first.config[MARK] = _mark(run, list(models)) | first.config.get(MARK, {})
    progress.advance(1)
    length = run.config.data.sequence_length
    frame = family_of(run.objective.networks()[next(iter(models))].encoder).frame
    tokenizer = to_huggingface_tokenizer(run.tokenizer_path, length, frame)
    card = model_card(card_facts(run, models, request.out.resolve().name))
    progress.advance(1)

    def write(folder: Path) -> None:
        write_networks(folder, first, others)
        write_file(folder / TOKENIZER_NAME, tokenizer.tokenizer)
        write_file(folder / TOKENIZER_CONFIG_NAME, tokenizer.config)
        write_file(folder / SETTINGS_NAME, to_toml(run.config).encode())
        write_file(folder / CARD_NAME, card.encode())

    publish(request.out, write)
    progress.advance(1)
    progress.finish()
    size = sum(path.stat().st_size for path in request.out.rglob("*") if path.is_file())
    return Exported(request.out, tuple(models), first.config["architectures"][0], first.num_parameters, run.step, size)


def write_networks(folder: Path, first: HuggingFaceModel, others: Iterable[tuple[str, HuggingFaceModel]]) -> None:
    """The files of the networks: the first at the root of the folder, the others in folders of their names."""
    first.write(folder)
    for name, model in others:
        (folder / name).mkdir()
        model.write(folder / name)
        sync_folder(folder / name)


def _models(run: LoadedRun, request: ExportRequest) -> dict[str, HuggingFaceModel]:
    """The wanted networks by name, the one for the root first."""
    networks, objective = run.objective.networks(), run.config.objective.name
    first = next(iter(networks))
    name = request.network or first
    if name not in networks:
        raise ConfigError(f"objective '{objective}' has no network '{name}'", hint=did_you_mean(name, networks))
    if request.all_networks and name != first:
        raise ConfigError(
            f"with all networks, the {first} is the one at the root, not the {name}",
            hint=f"leave out --network; the {name} will be in the folder '{name}'",
        )
    if request.precision not in PRECISIONS:
        raise ConfigError(f"unknown precision '{request.precision}'", hint=did_you_mean(request.precision, PRECISIONS))
    wanted = networks if request.all_networks else {name: networks[name]}
    refuse_alone(name, architecture(networks[name]))
    models = {name: to_huggingface(network, run.vocabulary, request.precision) for name, network in wanted.items()}
    for model in models.values():
        check_finite(model, run.folder)
    return models


def refuse_alone(name: str, loads_as: str) -> None:
    """Raise where a network cannot stand at the root, for transformers to load.

    Raises:
        ConfigError: it has two towers.
    """
    if loads_as == TWO_TOWER_CLASS:
        raise ConfigError(
            f"the {name} has two towers, and transformers has no such model",
            hint="leave out --network and add --all-networks, which stores it beside the discriminator for discern",
        )


def check_finite(model: HuggingFaceModel, run: Path) -> None:
    """Raise a NumericsError where a weight is not finite, or too large for the precision."""
    for name, tensor in (model.tensors | model.head).items():
        if not tensor.isfinite().all():
            hint = "export an earlier or another run"
            if model.config["dtype"] == "float16":
                hint = "float16 ends at 65504: take --precision bfloat16; or " + hint
            raise NumericsError(f"{run}: '{name}' holds values that are not finite", hint=hint)


def _mark(run: LoadedRun, networks: list[str]) -> dict[str, object]:
    """What discern must know of an export, besides its settings, to go on with it; no path, no name of a machine."""
    return {
        "version": __version__,
        "objective": run.config.objective.name,
        "networks": networks,
        "step": run.step,
        "tokenizer_fingerprint": run.record["tokenizer_fingerprint"],
    } | {name: run.record[name] for name in ("language", TEXT_LICENSE) if name in run.record}
