"""The reference of the settings, from the configuration models, and the presets with their sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from docs._sphinx.pages import code, prose, table
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from discern.compare.settings import CompareConfig
from discern.config.layers import preset_names, preset_summary, usual_vocabulary
from discern.config.schema import NONE, expectation, flatten, keys_of, toml_value
from discern.data.batching.synthetic import SPECIAL
from discern.data.config import DataConfig
from discern.finetuning.settings import FilesConfig, FinetuneSection
from discern.model_files.run import build_objective
from discern.models import encoders
from discern.models.config import config_class
from discern.objectives import objectives
from discern.objectives.base import Vocabulary
from discern.tasks import families
from discern.training.config import OptimizerConfig, TrainConfig
from discern.training.pretrain_config import PretrainConfig, load_pretrain_config

_SHORT = 60
_Variants = Mapping[str, type[BaseModel]]


@cache
def parts() -> dict[str, str]:
    """The settings of each section, and the presets."""
    return {
        "settings-data": _section("data", {"": DataConfig}),
        "settings-model": _section("model", _registered(encoders.names(), config_class), "encoder"),
        "settings-objective": _section("objective", _registered(objectives.names(), _objective), "objective"),
        "settings-optimizer": _section("optimizer", {"": OptimizerConfig}),
        "settings-train": _section("train", {"": TrainConfig}),
        "settings-finetune": _section("finetune", {"": FinetuneSection}),
        "settings-files": _section("files", {"": FilesConfig}),
        "settings-task": _section("task", _registered(families.names(), _family), "family of tasks"),
        "settings-compare": _section("", {"": CompareConfig}),
        "presets": _presets(),
    }


def _registered(names: list[str], find: Callable[[str], type[BaseModel]]) -> _Variants:
    return {name: find(name) for name in names}


def _objective(name: str) -> type[BaseModel]:
    found: Any = objectives.load(name)
    kind: type[BaseModel] = found.Config
    return kind


def _family(name: str) -> type[BaseModel]:
    found: Any = families.load(name)
    kind: type[BaseModel] = found.Config
    return kind


@cache
def _resolved() -> dict[str, PretrainConfig]:
    return {name: load_pretrain_config(None, name).config for name in preset_names()}


def _section(section: str, variants: _Variants, kind: str = "") -> str:
    """Every key of a section, with those that only some variants have."""
    having: dict[str, dict[str, FieldInfo]] = defaultdict(dict)
    for variant, model in variants.items():
        for name, field in keys_of(model)[1].items():
            if "." not in name:
                having[name][variant] = field
    return "\n".join(_key(section, name, fields, variants, kind) for name, fields in having.items())


def _key(section: str, name: str, fields: Mapping[str, FieldInfo], variants: _Variants, kind: str) -> str:
    """One key: its description, type, limits, default, and the presets with other values."""
    key = f"{section}.{name}" if section else name
    facts = [f"**Type:** {_by_variant(fields, _type)}", f"**Default:** {_by_variant(fields, _value_of)}"]
    if len(fields) < len(variants):
        facts.append(f"**Only for {kind}:** {', '.join(code(variant) for variant in fields)}")
    other = _other_values(section, name)
    facts += [f"**Presets with other values:** {other}"] if other else []
    # An anchor of its own: the heading's would be run together from section and name.
    return f"({key})=\n### `{key}`\n\n{_said(fields)}\n\n" + "\\\n".join(facts) + "\n"


def _said(fields: Mapping[str, FieldInfo]) -> str:
    """The description; a list where it is another one for some variants."""
    described = _grouped(fields, lambda field: prose(field.description or ""))
    if len(described) == 1:
        return next(iter(described))
    return "\n".join(f"- {', '.join(code(name) for name in names)}: {text}" for text, names in described.items())


def _by_variant(fields: Mapping[str, FieldInfo], show: Callable[[FieldInfo], str]) -> str:
    """What `show` says of a field, or of each variant where that differs."""
    shown = _grouped(fields, show)
    if len(shown) == 1:
        return next(iter(shown))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in shown.items())


def _grouped(fields: Mapping[str, FieldInfo], show: Callable[[FieldInfo], str]) -> dict[str, list[str]]:
    """The variants by what `show` says of their field."""
    found: dict[str, list[str]] = defaultdict(list)
    for variant, field in fields.items():
        found[show(field)].append(variant)
    return found


def _type(field: FieldInfo) -> str:
    return prose(expectation(field))


def _value_of(field: FieldInfo) -> str:
    return "required" if field.is_required() else _shown(field.get_default(call_default_factory=True, validated_data={}))


def _shown(value: Any) -> str:
    if value is None:
        return code(NONE)
    if isinstance(value, BaseModel):
        return "see its keys"
    text = str(value) if isinstance(value, dict) else toml_value(value)
    return code(text) if len(text) <= _SHORT else "a schedule"


def _other_values(section: str, name: str) -> str:
    """The values that presets give a key of pre-training, where they are not its default."""
    by_value: dict[str, list[str]] = defaultdict(list)
    key = f"{section}.{name}"
    for preset, config in _resolved().items():
        values = flatten(config)
        if key in values:
            field = type(getattr(config, section)).model_fields[name]
            shown = _shown(values[key])
            if shown != _value_of(field) and not field.is_required():
                by_value[shown].append(preset)
    return "; ".join(f"{value} in {', '.join(names)}" for value, names in by_value.items())


def _presets() -> str:
    """Every preset with its sizes; parameters are counted on the meta device, shared ones once."""
    rows = []
    for name, config in _resolved().items():
        model, data, train = config.model, config.data, config.train
        vocabulary = usual_vocabulary(name)
        with torch.device("meta"):
            objective = build_objective(config, Vocabulary(vocabulary, SPECIAL))
        parameters = sum(parameter.numel() for parameter in objective.parameters())
        rows.append(
            (
                code(name),
                prose(preset_summary(name)),
                code(config.objective.name),
                f"{model.encoder}, {model.num_layers} x {model.hidden_size}",
                f"{parameters / 1e6:.1f} M",
                f"{vocabulary:,}",
                f"{data.sequence_length}",
                f"{train.max_steps:,} of {train.sequences_per_step}",
            )
        )
    heads = ("preset", "what it is", "objective", "encoder", "parameters", "vocabulary", "length", "steps of sequences")
    return table(heads, rows)
