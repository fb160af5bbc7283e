"""A network of a run as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern import __version__
from discern.config.presets import preset_names
from discern.config.tree import diff, flatten
from discern.data.files import write_file
from discern.data.tokenizer import load_tokenizer, lowercases
from discern.errors import ConfigError, NumericsError, did_you_mean
from discern.interop.folder import CARD_NAME, MARK, check_target, publish
from discern.interop.huggingface import CONFIG_NAME, WEIGHTS_NAME, HuggingFaceModel, to_huggingface
from discern.interop.model_card import CardFacts, model_card
from discern.interop.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, to_huggingface_tokenizer
from discern.progress import Progress
from discern.training.journal import read_metrics
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.runs import LoadedRun, load_run
from discern.workflows.settings import PretrainConfig

# Settings that don't change what a model is: how often something is written, and how the same numbers are computed.
_HOUSEKEEPING = ["checkpoint_every_steps", "keep_checkpoints", "evaluate_every_steps", "evaluate_sequences", "log_every_steps"]
_HOUSEKEEPING += ["tensorboard", "micro_batch_size", "compile", "gradient_checkpointing", "seed"]


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: where.
        network: which of the objective's networks.
        architecture: class of transformers that loads it.
        parameters: how many, the tied matrix counted once.
        step: of the checkpoint.
    """

    folder: Path
    network: str
    architecture: str
    parameters: int
    step: int


def export(run: Path, out: Path, network: str | None, progress: Progress, warn: Callable[[str], None]) -> Exported:
    """Write a network of a run, with tokenizer and model card, as a folder that transformers loads.

    Args:
        run: folder of the run; its newest sound checkpoint is taken.
        out: new or empty folder, or an earlier export, which is replaced as a whole.
        network: name among the objective's networks; None: the first, which is what one fine-tunes.
        warn: told of damaged checkpoints that were passed over.

    Raises:
        ConfigError: the objective has no network of that name.
        DataError: `run` is no run, or `out` holds something else or cannot be written.
        CheckpointError: the run has no sound checkpoint.
        NumericsError: a weight is not finite.
    """
    check_target(out)
    progress.start("exporting", 3, "parts")
    loaded = load_run(run, warn=warn)
    networks = loaded.objective.networks()
    name = network or next(iter(networks))
    if name not in networks:
        raise ConfigError(
            f"objective '{loaded.config.objective.name}' has no network '{name}'", hint=did_you_mean(name, networks)
        )
    model = to_huggingface(networks[name], loaded.vocabulary)
    _check_finite(model, run)
    model.config[MARK] = {"version": __version__, "objective": loaded.config.objective.name, "network": name, "step": loaded.step}
    progress.advance(1)
    length = min(loaded.config.data.sequence_length, loaded.config.model.max_positions)
    tokenizer = to_huggingface_tokenizer(loaded.tokenizer_path, length)
    card = model_card(_facts(loaded, name, model, out))
    progress.advance(1)

    def write(folder: Path) -> None:
        write_file(folder / CONFIG_NAME, model.config_bytes())
        model.write_weights(folder / WEIGHTS_NAME)
        write_file(folder / TOKENIZER_NAME, tokenizer.tokenizer)
        write_file(folder / TOKENIZER_CONFIG_NAME, tokenizer.config)
        write_file(folder / CARD_NAME, card.encode())

    publish(out, write)
    progress.advance(1)
    progress.finish()
    parameters = sum(tensor.numel() for tensor in model.tensors.values())
    return Exported(out, name, model.config["architectures"][0], parameters, loaded.step)


def _check_finite(model: HuggingFaceModel, run: Path) -> None:
    for name, tensor in model.tensors.items():
        if not tensor.isfinite().all():
            raise NumericsError(f"{run}: '{name}' holds values that are not finite", hint="export an earlier or another run")


def _facts(run: LoadedRun, network: str, model: HuggingFaceModel, out: Path) -> CardFacts:
    """What is known of the model, for its card; no path, no name of a machine."""
    records = [record for record in read_metrics(run.folder) if record.get("step", 0) <= run.step]
    evaluated: dict[str, Any] = next((record for record in reversed(records) if "heldout_loss" in record), {})
    reference = _reference(run.config)
    tokenizer = load_tokenizer(run.tokenizer_path)
    casing = "lower-cased" if lowercases(tokenizer) else "cased"
    return CardFacts(
        title=out.resolve().name,
        network=network,
        model=model,
        version=__version__,
        objective=run.config.objective.name,
        step=run.step,
        settings=flatten(run.config),
        tokenizer=f"{type(tokenizer.model).__name__}, {casing}",
        reference=reference,
        differences=_differences(run.config, reference) if reference else (),
        data=run.record.get("statistics", {}),
        tokens_seen=records[-1].get("tokens") if records else None,
        evaluation=_held_out(evaluated),
        evaluated_at=evaluated.get("step"),
        versions={"discern": run.record.get("discern", "unknown"), **run.record.get("versions", {})},
    )


def _held_out(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of an evaluation, without those of training that stand on the same line of the journal."""
    training = {"step", "tokens", "seconds", "tokens_per_second", "learning_rate", "grad_norm"}
    training |= {name.removeprefix("heldout_") for name in record if name.startswith("heldout_")}
    return {name: value for name, value in record.items() if name not in training and isinstance(value, int | float)}


def _reference(config: PretrainConfig) -> str | None:
    """The preset of the same objective and the nearest width; None where there is none. `tiny` and `demo` are no recipes."""
    presets = {name: _preset(name) for name in preset_names() if name not in ("tiny", "demo")}
    same = [name for name, preset in presets.items() if preset.objective.name == config.objective.name]
    distance = {name: abs(presets[name].model.hidden_size - config.model.hidden_size) for name in same}
    return min(same, key=lambda name: (distance[name], len(_differences(config, name))), default=None)


def _differences(config: PretrainConfig, preset: str) -> list[tuple[str, Any, Any]]:
    """Settings that differ from a preset's, sizes and housekeeping apart."""
    pairs = diff(config, _preset(preset))
    return [pair for pair in pairs if not pair[0].startswith("model.") and pair[0].removeprefix("train.") not in _HOUSEKEEPING]


def _preset(name: str) -> PretrainConfig:
    return load_pretrain_config(None, name).config
