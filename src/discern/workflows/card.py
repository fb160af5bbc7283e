"""What the card of an export says: gathered from a run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from discern import __version__
from discern.config.presets import preset_names
from discern.config.tree import diff, flatten
from discern.data.tokenizer import load_tokenizer, lowercases
from discern.interop.huggingface import HuggingFaceModel
from discern.interop.model_card import CardFacts
from discern.training.journal import held_out_figures, read_metrics
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.runs import TEXT_LICENSE, LoadedRun
from discern.workflows.settings import PretrainConfig

# Settings that don't change what a model is: how often something is written, and how the same numbers are computed.
_HOUSEKEEPING = ["checkpoint_every_steps", "keep_checkpoints", "evaluate_every_steps", "evaluate_sequences", "log_every_steps"]
_HOUSEKEEPING += ["tensorboard", "micro_batch_size", "compile", "gradient_checkpointing", "seed"]
_SIZES = ["num_layers", "hidden_size", "embedding_size", "num_heads", "feedforward_size", "max_positions", "num_token_types"]
_NO_DIFFERENCE = {*(f"train.{name}" for name in _HOUSEKEEPING), *(f"model.{name}" for name in _SIZES)}


def card_facts(run: LoadedRun, models: Mapping[str, HuggingFaceModel], title: str) -> CardFacts:
    """What is known of an export; no path, no name of a machine.

    Args:
        models: by the name of the network; the first is the one at the root.
    """
    records = [record for record in read_metrics(run.folder) if record.get("step", 0) <= run.step]
    evaluated: dict[str, Any] = next((record for record in reversed(records) if "heldout_loss" in record), {})
    reference = _reference(run.config)
    tokenizer = load_tokenizer(run.tokenizer_path)
    casing = "lower-cased" if lowercases(tokenizer) else "cased"
    (network, model), *others = models.items()
    return CardFacts(
        title=title,
        network=network,
        model=model,
        others=dict(others),
        version=__version__,
        objective=run.config.objective.name,
        step=run.step,
        settings=flatten(run.config),
        tokenizer=f"{type(tokenizer.model).__name__}, {casing}",
        reference=reference,
        differences=_differences(run.config, reference) if reference else (),
        data=run.record.get("statistics", {}),
        language=run.record.get("language"),
        text_license=run.record.get(TEXT_LICENSE),
        tokens_seen=records[-1].get("tokens") if records else None,
        evaluation=held_out_figures(evaluated),
        evaluated_at=evaluated.get("step"),
        versions={"discern": run.record.get("discern", "unknown"), **run.record.get("versions", {})},
    )


# Settings that make a recipe another one, before any size.
_KINDS = {"model.initialisation", "model.normalisation", "objective.tying", "objective.discriminator_head"}


def _reference(config: PretrainConfig) -> str | None:
    """The preset of the same objective that starts and shares in the same way, and is nearest in width; None where there is
    none. `tiny` and `demo` are no recipes."""
    presets = {name: _preset(name) for name in preset_names() if name not in ("tiny", "demo")}
    same = [name for name, preset in presets.items() if preset.objective.name == config.objective.name]

    def distance(name: str) -> tuple[int, int, int]:
        differences = [key for key, *_ in _differences(config, name)]
        kinds = sum(key in _KINDS for key in differences)
        return kinds, abs(presets[name].model.hidden_size - config.model.hidden_size), len(differences)

    return min(same, key=distance, default=None)


def _differences(config: PretrainConfig, preset: str) -> list[tuple[str, Any, Any]]:
    """Settings that differ from a preset's, sizes and housekeeping apart."""
    return [pair for pair in diff(config, _preset(preset)) if pair[0] not in _NO_DIFFERENCE]


def _preset(name: str) -> PretrainConfig:
    return load_pretrain_config(None, name).config
