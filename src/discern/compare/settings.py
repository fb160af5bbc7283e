"""The TOML file of a comparison: its runs, its budget, its seeds and the tasks that evaluate them."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from discern.config.schema import Section, toml_value
from discern.errors import ConfigError, did_you_mean
from discern.finetuning.settings import Recipe
from discern.parsing import toml_tables
from discern.tasks import tasks as registry

UNTRAINED = "untrained"
"""The name of the baseline's row."""

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


class RunSpec(Section):
    """One row of the comparison: its differences from the settings that all rows share."""

    name: str = Field(description="Name of the run: of its row in the results, and of its folders.")
    preset: str | None = Field(None, description="Preset to start from (default: the one that all runs share).")
    config: Path | None = Field(
        None, description="TOML file over the preset, relative to this file (default: the one that all runs share)."
    )
    set: dict[str, Any] = Field(default_factory=dict, description="Settings of this run; they override all others.")
    budget: float = Field(1.0, gt=0, description="Fraction of the comparison's budget that this run gets.")
    network: str | None = Field(None, description="Network to fine-tune (default: the one that `discern export` exports).")

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("a name consists of letters, digits and . _ + -, because it names folders")
        return value

    @field_validator("set")
    @classmethod
    def _flat(cls, value: dict[str, Any]) -> dict[str, Any]:
        return dict(_flat(value))


class FinetuneSpec(Section):
    """Settings of the fine-tuning of every encoder."""

    seeds: int = Field(1, ge=1, description="Number of fine-tuning seeds per encoder and task; the score is their median.")
    recipe: Recipe = Field("paper", description="Recipe, as for `discern finetune --recipe`.")
    set: dict[str, Any] = Field(default_factory=dict, description="Settings of all fine-tuning runs.")
    task_set: dict[str, dict[str, Any]] = Field(default_factory=dict, description="Further settings by task name.")

    @field_validator("set")
    @classmethod
    def _flat(cls, value: dict[str, Any]) -> dict[str, Any]:
        return dict(_flat(value))

    @field_validator("task_set")
    @classmethod
    def _each_flat(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {task: dict(_flat(settings)) for task, settings in value.items()}


class CompareConfig(Section):
    """A comparison. The first run is the reference: it sets the budget, and the other runs are tested against it."""

    equal: Literal["flops", "seconds", "tokens"] = Field(
        "flops",
        description="The cost that is equal for all runs. 'flops': executed FLOPs of the matrix products; 'seconds': training "
        "time; 'tokens': positions read.",
    )
    seeds: int = Field(3, ge=1, description="Number of pre-training seeds per run.")
    tasks: tuple[str, ...] = Field((), description="Task names, as for `discern finetune --task`.")
    task_data: dict[str, Path] = Field(default_factory=dict, description="Folder of each task by name, relative to this file.")
    preset: str | None = Field(None, description="Preset that all runs start from; --preset overrides it.")
    config: Path | None = Field(None, description="TOML file over the preset, relative to this file.")
    set: dict[str, Any] = Field(default_factory=dict, description="Settings of all runs; --set overrides them.")
    run: tuple[RunSpec, ...] = Field(description="The runs, the reference first.")
    finetune: FinetuneSpec = Field(default_factory=FinetuneSpec)
    baseline: bool = Field(False, description="Also evaluate the reference's networks at step 0.")
    keep: Literal["results", "encoder", "all"] = Field(
        "encoder",
        description="What to keep of a finished run besides its result files: nothing, the exported encoder, or everything.",
    )

    @field_validator("set")
    @classmethod
    def _flat(cls, value: dict[str, Any]) -> dict[str, Any]:
        return dict(_flat(value))

    @model_validator(mode="after")
    def _fits_together(self) -> CompareConfig:
        names = [run.name for run in self.run]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if not names:
            raise ValueError("there is no [[run]]: add at least one")
        if twice:
            raise ValueError(f"several runs are called {', '.join(twice)}; names must differ")
        if self.baseline and UNTRAINED in names:
            raise ValueError(f"'{UNTRAINED}' is the name of the baseline; give the run another name, or set baseline = false")
        if self.run[0].budget != 1:
            raise ValueError(f"run '{names[0]}' is the reference, whose budget is always 1; set budget for the other runs")
        for run in self.run[1:]:
            if "train.seed" in run.set:
                raise ValueError(f"run '{run.name}' sets train.seed, but all runs have the seeds of '{names[0]}'; remove it")
            if "train.max_steps" in run.set:
                raise ValueError(
                    f"run '{run.name}' sets train.max_steps, which follows from the budget of '{names[0]}'; "
                    "remove it, or give the run a fraction of the budget: budget = 0.5"
                )
        stray = sorted(({*self.finetune.task_set} | {*self.task_data}) - {*self.tasks})
        if stray:
            raise ValueError(f"settings or folders are given for {', '.join(stray)}, not among the tasks ({_listed(self.tasks)})")
        return self


def load_compare_config(path: Path) -> CompareConfig:
    """Read the TOML file of a comparison; the paths in it become relative to the working directory.

    Raises:
        ConfigError: the file cannot be read or is invalid; the message lists all problems.
    """
    try:
        tree = toml_tables(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}",
            hint="give the TOML file of a comparison; docs/howto/compare.md shows one",
        ) from problem
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(
            f"{path} is not valid TOML: {problem}", hint='text needs quotes: set = { "objective.name" = "mlm" }'
        ) from problem
    try:
        config = CompareConfig.model_validate(tree)
    except ValidationError as problem:
        raise _explained(path, tree, problem) from problem
    for task in config.tasks:
        if task not in registry.names():
            raise ConfigError(f"{path}: unknown task '{task}'", hint=did_you_mean(task, registry.names()))
    if len(set(config.tasks)) < len(config.tasks):
        raise ConfigError(f"{path}: a task is named twice: {_listed(config.tasks)}", hint="name each task once")
    beside = path.parent
    return config.model_copy(
        update={
            "config": config.config and beside / config.config,
            "task_data": {task: beside / folder for task, folder in config.task_data.items()},
            "run": tuple(run.model_copy(update={"config": run.config and beside / run.config}) for run in config.run),
        }
    )


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings in the form that `--set` takes."""
    return [f"{key}={toml_value(value)}" for key, value in settings.items()]


def finetune_overrides(config: CompareConfig, task: str) -> list[str]:
    """The settings with which every encoder is fine-tuned on a task, in the form that `--set` takes."""
    return as_overrides({**config.finetune.set, **config.finetune.task_set.get(task, {})})


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The settings of a table by dotted key, whether it was written with dotted names or with nested tables."""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


_SECTIONS: dict[str, type[BaseModel]] = {"": CompareConfig, "run": RunSpec, "finetune": FinetuneSpec}


def _explained(path: Path, tree: Mapping[str, Any], problem: ValidationError) -> ConfigError:
    """The problems that pydantic found, as one error about the file."""
    lines = []
    for error in problem.errors(include_url=False):
        place = [str(part) for part in error["loc"]]
        section = place[0] if place and place[0] in _SECTIONS and len(place) > 1 else ""
        where = f"[{section}]" if section else "the file"
        if section == "run":
            given = tree["run"][int(place[1])] if len(place) > 2 and isinstance(tree.get("run"), list) else {}
            name = given.get("name") if isinstance(given, dict) else None
            where = f"[[run]] number {int(place[1]) + 1}" + (f" ('{name}')" if name else "") if place[1].isdigit() else "[[run]]"
        key = place[-1] if place else ""
        known = _SECTIONS[section].model_fields
        message = error["msg"].removeprefix("Value error, ")
        if error["type"] == "extra_forbidden":
            message = f"unknown key '{key}'; {did_you_mean(key, known)}"
        elif error["type"] == "missing":
            message = "there is no [[run]]: add at least one" if key == "run" else f"'{key}' is missing"
        elif key:
            message = f"{key} is {error['input']!r}: {message[:1].lower()}{message[1:]}"
        lines.append(f"{where}: {message}")
    return ConfigError("\n".join([f"{path} does not describe a comparison:", *(f"- {line}" for line in lines)]), hint=_EXAMPLE)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


_EXAMPLE = 'a run is:  [[run]]  name = "mlm"  set = { "objective.name" = "mlm" };  docs/howto/compare.md has all keys'
