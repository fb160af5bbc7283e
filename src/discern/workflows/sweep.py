"""The same fine-tuning with several values of some settings, side by side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from discern.config.layers import parse_overrides
from discern.config.schema import Schema
from discern.errors import ConfigError, did_you_mean
from discern.progress import Progress
from discern.training.parallel import join_ranks
from discern.workflows.finetune import FinetuneRequest, prepare_finetuning, settle, train_seeds
from discern.workflows.finetune_seed import Plan
from discern.workflows.finetune_settings import FinetuneConfig
from discern.workflows.finetuned import write_json
from discern.workflows.model_choice import choose_encoder
from discern.workflows.submission import check_submission, submit

SWEEP_FILE = "sweep.json"


def sweep(request: FinetuneRequest, axes: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Every combination of the values, each in a folder of its own in `request.out`, the best by the median of its seeds.

    `chosen_on` names the splits whose scores chose the best; None where there was nothing to choose from.

    Args:
        axes: "learning_rate=1e-4,3e-4"; a key without a section is looked for among all.

    Raises:
        ConfigError: an axis has no values or no such key; and as of `finetune`.
    """
    if request.submission is not None:
        check_submission([name for name, _ in request.tasks])
    keys, values = zip(*map(_axis, axes), strict=True)
    combinations = [dict(zip(keys, combination, strict=True)) for combination in itertools.product(*values)]
    requests = [_with(request, settings) for settings in combinations]
    loaded = choose_encoder(request.model, request.tokenizer, untrained=request.untrained, warn=progress.note)
    for each in requests:
        settle(each, loaded)  # what is wrong with the last value should not show after hours of the others
    rows: list[dict[str, Any]] = []
    best: tuple[Plan, dict[str, Any]] | None = None
    with join_ranks(request.device) as ranks:
        for settings, each in zip(combinations, requests, strict=True):
            name = each.out.relative_to(request.out).as_posix()
            progress.note(f"sweep: {name}")
            plan = prepare_finetuning(each, progress, loaded)
            results = train_seeds(each, plan, ranks, progress, request.out)
            figures = {key: results[key] for key in ("metric", "median", "standard_deviation", "scores", "failed_seeds")}
            rows.append({"folder": name, "settings": settings, **figures})
            if best is None or _median(results) > _median(best[1]):
                best = plan, results | {"best_folder": name}
        assert best is not None
        plan, results = best
        entries = results.get("tasks", {"": results}).values()
        splits = ", ".join(dict.fromkeys(entry["split"] for entry in entries))
        found = {**results, "chosen_on": splits if len(rows) > 1 else None, "sweep": rows}
        if ranks.writes:
            write_json(request.out / SWEEP_FILE, found)
            if request.submission is not None:
                found |= submit(plan, results["best_seed"], request.submission, ranks.device, progress)
    return found


def _folder_of(settings: Mapping[str, str]) -> str:
    return ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())


def _with(request: FinetuneRequest, settings: Mapping[str, str]) -> FinetuneRequest:
    """The request of one combination. It keeps `submission`: the test files are predicted with the rest."""
    chosen = (f"{key}={value}" for key, value in settings.items())
    return replace(request, out=request.out / _folder_of(settings), overrides=(*request.overrides, *chosen))


def _median(results: Mapping[str, Any]) -> float:
    """Of the headline, of which more is better; without a score the least of all."""
    return float("-inf") if results["median"] is None else float(results["median"])


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
