"""Fine-tune with several values of some settings, and choose the best combination."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from discern.config.layers import parse_overrides
from discern.config.schema import Schema
from discern.errors import ConfigError, did_you_mean
from discern.finetuning.run import check_folders, check_plan, choose_encoder, prepare_finetuning, resolve_finetuning, train_seeds
from discern.finetuning.seed import FinetunePlan, check_layers
from discern.finetuning.settings import FinetuneConfig, Recipe
from discern.finetuning.submission import submit
from discern.progress import Progress
from discern.storage.checksums import write_json
from discern.training.distributed import check_consistency, join_ranks

SWEEP_FILE = "sweep.json"


def sweep(
    model: str,
    *,
    axes: Sequence[str],
    out: Path,
    progress: Progress,
    tasks: Sequence[tuple[str, Path]] = (),
    config: Path | None = None,
    overrides: Sequence[str] = (),
    recipe: Recipe = "auto",
    seeds: int = 1,
    untrained: bool = False,
    tokenizer: Path | None = None,
    submission: Path | None = None,
    baselines: bool = True,
    debug: bool = False,
    device: str = "auto",
) -> dict[str, Any]:
    """Fine-tune with every combination of the values, and return the results of the best by the median of its seeds.

    Each combination has a folder of its own in `out`. In the results, `chosen_on` names the splits whose scores chose the
    best combination; it is None if there was only one.

    Args:
        axes: values per setting, "learning_rate=1e-4,3e-4"; the section of a key may be left out.

    The other arguments are those of `finetune`.

    Raises:
        ConfigError: an axis has no values or an unknown key; otherwise as `finetune`.
    """
    keys, values = zip(*map(_axis, axes), strict=True)
    combinations = [dict(zip(keys, combination, strict=True)) for combination in itertools.product(*values)]
    for combination in combinations:
        check_folders(model, out / _folder_name(combination), tasks, submission)
    loaded = choose_encoder(model, tokenizer, untrained=untrained, warn=progress.note)
    # All combinations are resolved first: a mistake in the last value should not show after hours of training.
    resolved = [
        resolve_finetuning(
            loaded,
            tasks=tasks,
            config=config,
            overrides=(*overrides, *(f"{key}={value}" for key, value in combination.items())),
            recipe=recipe,
        )
        for combination in combinations
    ]
    for settings in resolved:
        if settings.config.finetune.layers is not None:
            check_layers(loaded, settings.config.finetune.layers)
    rows: list[dict[str, Any]] = []
    best: tuple[FinetunePlan, dict[str, Any]] | None = None
    with join_ranks(device) as ranks:
        check_consistency(ranks, {"sweep": " ".join(map(_folder_name, combinations))})
        for combination, settings in zip(combinations, resolved, strict=True):
            name = _folder_name(combination)
            progress.note(f"sweep: {name}")
            submits = submission is not None
            plan = prepare_finetuning(loaded, settings, out=out / name, debug=debug, submits=submits, progress=progress)
            check_plan(plan, seeds, ranks)
            results = train_seeds(plan, seeds, ranks, progress, baselines_folder=out if baselines else None)
            metrics = {key: results[key] for key in ("metric", "median", "standard_deviation", "scores", "failed_seeds")}
            rows.append({"folder": name, "settings": combination, **metrics})
            if best is None or _median(results) > _median(best[1]):
                best = plan, results | {"best_folder": name}
        assert best is not None
        plan, results = best
        entries = results.get("tasks", {"": results}).values()
        splits = ", ".join(dict.fromkeys(entry["split"] for entry in entries))
        found = {**results, "chosen_on": splits if len(rows) > 1 else None, "sweep": rows}
        if ranks.writes:
            write_json(out / SWEEP_FILE, found)
            if submission is not None:
                found |= submit(plan, results["best_seed"], submission, ranks.device, progress)
    return found


def _folder_name(combination: Mapping[str, str]) -> str:
    return ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in combination.items())


def _median(results: Mapping[str, Any]) -> float:
    """Median of the headline metric, minus infinity without a score."""
    return float("-inf") if results["median"] is None else float(results["median"])


def _axis(text: str) -> tuple[str, list[str]]:
    key, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if not values:
        raise ConfigError(f"--sweep {text}: expected key=value,value", hint="for example --sweep learning_rate=1e-4,3e-4")
    parse_overrides([f"{key}={values[0]}"])
    return _whole_key(key.strip()), values


def _whole_key(key: str) -> str:
    """The key with its section, which is looked up if it is left out."""
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
        f"there is no setting '{key}'", hint=f"for a setting of the task: --sweep task.{key}=...; {did_you_mean(key, names)}"
    )
