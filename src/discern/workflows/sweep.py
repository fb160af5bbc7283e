"""The same fine-tuning with several values of some settings, side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from discern.config.layers import parse_overrides
from discern.config.schema import Schema
from discern.errors import ConfigError, did_you_mean
from discern.progress import Progress
from discern.workflows.finetune import FinetuneRequest, finetune
from discern.workflows.finetune_settings import FinetuneConfig
from discern.workflows.finetuned import write_json

SWEEP_FILE = "sweep.json"


def sweep(request: FinetuneRequest, axes: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Every combination of the values, each in a folder of its own in `request.out`, the best by the median of its seeds.

    Args:
        axes: "learning_rate=1e-4,3e-4"; a key without a section is looked for among all.

    Raises:
        ConfigError: an axis has no values or no such key; and as of `finetune`.
    """
    keys, values = zip(*map(_axis, axes), strict=True)
    rows: list[dict[str, Any]] = []
    best: dict[str, Any] = {}
    for combination in itertools.product(*values):
        chosen = [f"{key}={value}" for key, value in zip(keys, combination, strict=True)]
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in zip(keys, combination, strict=True))
        progress.note(f"sweep: {name}")
        results = finetune(replace(request, out=request.out / name, overrides=(*request.overrides, *chosen)), progress)
        settings = dict(zip(keys, combination, strict=True))
        figures = {key: results[key] for key in ("metric", "median", "standard_deviation", "scores", "failed_seeds")}
        rows.append({"folder": name, "settings": settings, **figures})
        if not best or (results["median"] or float("-inf")) > (best["median"] or float("-inf")):
            best = results | {"best_folder": name}
    found = {**best, "sweep": rows}
    write_json(request.out / SWEEP_FILE, found)
    return found


def _axis(text: str) -> tuple[str, list[str]]:
    key, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if not values:
        raise ConfigError(f"--sweep {text}: expected key=value,value", hint="for example --sweep learning_rate=1e-4,3e-4")
    parse_overrides([f"{key}={values[0]}"])
    return _whole_key(key.strip()), values


def _whole_key(key: str) -> str:
    """The key with its section."""
    if "." in key:
        return key
    known = Schema.of(FinetuneConfig, {}, {}).fields
    found = [name for name in known if name.rpartition(".")[2] == key]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"--sweep {key} could be {' or '.join(found)}", hint=f"--sweep {found[0]}=...")
    names = [name.rpartition(".")[2] for name in known]
    raise ConfigError(
        f"there is no setting '{key}'", hint=f"{did_you_mean(key, names)} Settings of a task: --sweep task.{key}=..."
    )
