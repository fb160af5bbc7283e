"""What a fine-tuning writes into its folder: the record, before training, and the results.

The record is compared when the work is continued. The results are medians over the seeds, intervals, failed seeds, and simple
baselines to compare with.
"""

from __future__ import annotations

import json
import platform
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from discern import __version__
from discern.config.resolve import parse_toml
from discern.config.schema import flatten, leaves, plain, to_toml
from discern.data.tokenizer import fingerprint, load_tokenizer
from discern.errors import ConfigError, DataError
from discern.finetuning.plan import FinetunePlan, TaskData
from discern.model_files.finetuned import (
    CONFIG_FILE,
    RECORD_FILE,
    RESULTS_FILE,
    SCORES_FILE,
    TOKENIZER_FILE,
    is_finetuned,
    make_record,
    predictions_file,
    read_finetuned,
    read_scores,
    seed_folder,
)
from discern.progress import Progress
from discern.storage.checksums import CHECKSUMS_NAME, read_lines, read_text, verify_folder, write_json, write_recorded
from discern.storage.files import OutputFolder, cannot_write
from discern.tasks.base import Prediction, Predictions, Task
from discern.tasks.baselines import BaselineScore, best_baseline, measure_baselines
from discern.tasks.metrics import interval, paired
from discern.training.distributed import Ranks, check_ranks
from discern.training.execution import shared_precision

_ARITHMETIC = "arithmetic"
_SHOWN_DIGITS = 16  # of a hash


def check_ranks_agree(plan: FinetunePlan, ranks: Ranks) -> None:
    """Check that the settings work on several ranks, and that all are about to train the same model on the same examples.

    Raises:
        ConfigError, DataError: they do not, or a rank differs; the message names it. Nothing has been written.
    """
    if ranks.world_size == 1:
        return
    train = plan.config.train
    if train.sequences_per_step % ranks.world_size:
        raise ConfigError(
            f"train.sequences_per_step {train.sequences_per_step} cannot be divided evenly among {ranks.world_size} processes",
            hint=f"--set train.sequences_per_step={-(-train.sequences_per_step // ranks.world_size) * ranks.world_size}",
        )
    for name in plan.data:
        # The gradient of a step is computed from parts of it, for which a rank needs the whole weights.
        passes = getattr(plan.config.task_config(name), "texts_per_pass", None)
        if passes and train.divides_weights(ranks.world_size):
            raise ConfigError(
                f"{plan.config.task_prefix(name)}texts_per_pass is {passes}, which needs whole weights on every process, but "
                f"train.parallel is '{train.parallel}'",
                hint="--set train.parallel=ddp, or leave out texts_per_pass",
            )
    examples = {
        f"examples of {name} ({split})": digest[:_SHOWN_DIGITS]
        for name, data in plan.data.items()
        for split, digest in data.digests.items()
    }
    check_ranks(
        ranks,
        plan.out,
        plan.config,
        model=plan.loaded.source_fingerprint[:_SHOWN_DIGITS],
        tokenizer=fingerprint(load_tokenizer(plan.loaded.tokenizer_path))[:_SHOWN_DIGITS],
        seeds=str(plan.seeds),
        debug=str(plan.debug),
        version=__version__,
        **examples,
    )


def prepare_folder(plan: FinetunePlan, ranks: Ranks, folder: OutputFolder) -> None:
    """Lock the output folder, and write the tokenizer, the settings and the record of the fine-tuning.

    Raises:
        ConfigError, DataError: the folder holds something else, is in use by another process, or cannot be written.
    """
    ranks.run_on_rank_zero(lambda: _prepare(plan, folder))


def keep_precision(plan: FinetunePlan, ranks: Ranks) -> str:
    """The precision of all seeds: that of the folder's record, or else the one resolved now, which is recorded."""
    path, train = plan.out / RECORD_FILE, plan.config.train
    record = read_finetuned(plan.out) if ranks.writes else {}
    length = max(plan.config.task_config(name).sequence_length for name in plan.data)
    rows = train.micro_batch_size or train.sequences_per_step // ranks.world_size
    precision = shared_precision(train.precision, ranks, plan.loaded.encoder.config, rows * length, record.get(_ARITHMETIC))
    computed = {"device": ranks.device.type, "precision": precision.name, **precision.record()}
    if ranks.writes and record.get(_ARITHMETIC) != computed:
        write_json(path, record | {_ARITHMETIC: computed})
    return precision.name


def complete_seeds(out: Path) -> set[int]:
    """The seeds whose scores a folder holds."""
    return {int(path.parent.name.removeprefix("seed-")) for path in out.glob(f"seed-*/{SCORES_FILE}")}


def _prepare(plan: FinetunePlan, folder: OutputFolder) -> None:
    out = plan.out
    tokenizer = load_tokenizer(plan.loaded.tokenizer_path)
    record = make_record(
        plan.loaded,
        {name: data.task for name, data in plan.data.items()},
        {name: data.definition for name, data in plan.data.items()},
        {name: data.files for name, data in plan.data.items()},
        plan.config.finetune.frame,
    ) | {"debug": plan.debug, "tokenizer_fingerprint": fingerprint(tokenizer)}
    for name, data in plan.data.items():
        record["tasks"][name]["digests"] = data.digests
    folder.acquire()
    if not is_finetuned(out):
        folder.refuse_others({TOKENIZER_FILE, CONFIG_FILE, RECORD_FILE, CHECKSUMS_NAME}, "fine-tuned model")
    elif differences := _differences(out, record, plan):
        if not plan.overwrite:
            raise DataError(
                f"{out} holds another fine-tuning, which differs in: {'; '.join(differences)}",
                hint="choose another --out, or --overwrite",
            )
        for path in (*out.glob("seed-*"), out / "rates"):
            shutil.rmtree(path, ignore_errors=True)
        (out / RESULTS_FILE).unlink(missing_ok=True)
    else:
        for seed in complete_seeds(out):
            verify_folder(seed_folder(out, seed))
        old = read_finetuned(out)
        if _ARITHMETIC in old:
            record[_ARITHMETIC] = old[_ARITHMETIC]
        for name, entry in record["tasks"].items():
            entry["digests"] = old["tasks"][name]["digests"] | entry["digests"]
    folder.make()
    try:
        write_recorded(out, {TOKENIZER_FILE: tokenizer.to_str(), CONFIG_FILE: to_toml(plan.config)})
        write_json(out / RECORD_FILE, record)
    except OSError as problem:
        raise cannot_write(out, problem) from problem


def _differences(out: Path, record: Mapping[str, Any], plan: FinetunePlan) -> list[str]:
    """What differs between the fine-tuning that a folder holds and this one."""
    old, now = read_finetuned(out), json.loads(json.dumps(record))
    earlier = parse_toml(read_text(out / CONFIG_FILE, hint="copy the file back, or choose another --out"), str(out / CONFIG_FILE))
    settings = parse_toml(to_toml(plan.config), CONFIG_FILE)
    before, after = (_identity(old) | dict(leaves(earlier)), _identity(now) | dict(leaves(settings)))
    # A split that is not read this time may be read the next time. Files may be moved: their examples are compared.
    ignored = {key for key in before.keys() ^ after.keys() if key.startswith("the examples of ")}
    ignored |= {"files.train", "files.dev", "files.test"}
    return sorted(key for key in (before.keys() | after.keys()) - ignored if before.get(key) != after.get(key))


def _identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a fine-tuning what it is, by description."""
    identity = {
        "the model": record["encoder_fingerprint"],
        "the configuration of the encoder": record["encoder"],
        "the tokenizer": record["tokenizer_fingerprint"],
        "--debug": record["debug"],
        "the tasks": [*record["tasks"]],
    }
    for name, task in record["tasks"].items():
        identity |= {f"{key} of {name}": task[key] for key in ("labels", "layout")}
        identity |= {f"the examples of {name}, {split}": digest for split, digest in task["digests"].items()}
    return identity


# Of more examples, the interval of a score is narrower than the differences between seeds.
_MAX_EXAMPLES = 5000


def summarize(plan: FinetunePlan, seeds: Sequence[int], baselines: Mapping[str, Sequence[BaselineScore]]) -> dict[str, Any]:
    """The contents of results.json: the metrics of one task, or those of several tasks under `tasks` with their mean headline.

    `selected_on` names the split whose scores selected the weights (finetune.keep=best) or the learning rate
    (finetune.rate_search), or is None; if it is `split`, the scores are slightly optimistic.

    A seed that failed (it diverged, or predicts the same for every example) counts in the median like any other, unless it has no
    score at all; `failed_seeds` lists it. A seed that was trained again (finetune.retries) counts with its last attempt;
    `retried_seeds` lists the reasons why the others failed. `passes` and `kept_step` are those of the best seed.

    Args:
        baselines: baselines of each task.
    """
    config, scores = plan.config, {seed: read_scores(seed_folder(plan.out, seed)) for seed in seeds}
    kept = config.finetune.keep == "best" and config.train.evaluate_every_steps > 0
    tasks = {}
    for name, data in plan.data.items():
        tasks[name] = _of_task(plan.out, data, scores, baselines.get(name, ()))
        tasks[name]["selected_on"] = data.dev_name if kept or config.finetune.rate_search else None
    headline = next(iter(tasks.values())) if len(tasks) == 1 else _of_several(tasks, scores)
    values = dict(zip(seeds, headline["scores"], strict=True))
    best = max(seeds, key=lambda seed: (float("-inf") if values[seed] is None else values[seed], -seed))
    padding = [record["padding_fraction"] for record in scores.values()]
    return {
        **headline,
        **({"tasks": tasks} if len(tasks) > 1 else {}),
        "best_seed": best,
        "passes": scores[best]["passes"],
        "kept_step": scores[best]["kept_step"],
        "model": plan.loaded.description,
        "seeds": list(seeds),
        "seconds": round(sum(record["seconds"] for record in scores.values()), 1),
        "padding_fraction": round(statistics.fmean(padding), 4),
        "discern": __version__,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": {key: plain(value) for key, value in flatten(config).items() if value is not None},
    }


def _of_task(
    out: Path, data: TaskData, scores: Mapping[int, dict[str, Any]], baselines: Sequence[BaselineScore]
) -> dict[str, Any]:
    name, metric = data.task.name, data.task.metrics[0]
    entries = {seed: entry for seed, record in scores.items() if (entry := record["tasks"].get(name))}
    values = {seed: entry[metric] for seed, entry in entries.items()}
    reasons = {seed: record.get("failure") or record.get("failures", {}).get(name) for seed, record in scores.items()}
    split = data.evaluated[data.dev_name]
    predictions: list[Prediction] = []
    if values:  # those of the seed with the median score
        middle = sorted(values, key=lambda seed: values[seed])[(len(values) - 1) // 2]
        path = predictions_file(seed_folder(out, middle), name)
        hint = f"remove {path.parent}, then run the same `discern finetune` command"
        predictions = read_lines(path, hint=hint)
    return {
        "task": name,
        "metric": metric,
        "split": data.dev_name,
        "train_examples": len(data.train.examples),
        **({} if data.teacher is None else {"teacher": data.teacher | {"unlabeled_examples": len(data.taught)}}),
        "examples": len(split.examples),
        **spread(list(values.values())),
        "scores": [values.get(seed) for seed in scores],
        "metrics": {key: statistics.median(entry[key] for entry in entries.values()) for key in next(iter(entries.values()), ())},
        **compare(data.task, split.examples, predictions, baselines),
        "failed_seeds": {str(seed): reason for seed, reason in reasons.items() if reason},
        "retried_seeds": {
            str(seed): [attempt["failure"] for attempt in record["retried"]]
            for seed, record in scores.items()
            if "retried" in record
        },
        "files": data.files,
        "digests": data.digests,
    }


def _of_several(tasks: Mapping[str, dict[str, Any]], scores: Mapping[int, Any]) -> dict[str, Any]:
    """The mean of the headline metrics of several tasks."""
    columns = zip(*(entry["scores"] for entry in tasks.values()), strict=True)
    values = [statistics.fmean(column) if None not in column else None for column in columns]
    failed: dict[str, str] = {}
    for name, entry in tasks.items():
        for seed, reason in entry["failed_seeds"].items():
            failed[seed] = "; ".join(filter(None, (failed.get(seed), f"{name}: {reason}")))
    beaten = [entry["beats_baselines"] for entry in tasks.values() if entry["beats_baselines"] is not None]
    return {
        "task": "+".join(tasks),
        "metric": "mean",
        **spread([value for value in values if value is not None]),
        "scores": values,
        "metrics": {f"{name}_{key}": value for name, entry in tasks.items() for key, value in entry["metrics"].items()},
        "intervals": {name: entry["interval"] for name, entry in tasks.items()},
        "baselines": {name: entry["baselines"] for name, entry in tasks.items() if entry["baselines"]},
        "beats_baselines": all(beaten) if beaten else None,
        "failed_seeds": failed,
        "retried_seeds": next(iter(tasks.values()))["retried_seeds"],
        "selected_on": ", ".join(dict.fromkeys(entry["selected_on"] for entry in tasks.values() if entry["selected_on"])) or None,
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, mean, sample standard deviation (None for one value), best and worst; all None without values."""
    if not values:
        return dict.fromkeys(("median", "mean", "standard_deviation", "best", "worst"))
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
        "best": max(values),
        "worst": min(values),
    }


def measured_baselines(data: Mapping[str, TaskData], progress: Progress) -> dict[str, list[BaselineScore]]:
    """The baselines of each task on its evaluated split."""
    measured: dict[str, list[BaselineScore]] = {}
    for name, each in data.items():
        measured[name] = []
        for score in measure_baselines(each.task, each.train.examples, each.evaluated[each.dev_name].examples, progress.note):
            metric = each.task.metrics[0]
            progress.note(f"{name}: baseline, {score.title}: {metric} {score.metrics[metric]:.4f}")
            measured[name].append(score)
    return measured


def compare(
    task: Task[Any], examples: Sequence[Any], predictions: Predictions, baselines: Sequence[BaselineScore]
) -> dict[str, Any]:
    """The 95 % `interval` of the headline metric (None for many examples), and the comparison with the baselines.

    `beats_baselines` is true only if a paired test on the same examples supports it against `best_baseline`; `comparison` has
    the difference, its interval and the verdict.

    Args:
        predictions: predictions of the model for the examples; empty if it has no score.
    """
    few = bool(predictions) and len(examples) < _MAX_EXAMPLES
    best = best_baseline(task.metrics[0], baselines)
    comparison = paired(task, examples, predictions, best.predictions) if best is not None and predictions else None
    return {
        "interval": list(interval(task, examples, predictions)) if few else None,
        "baselines": {baseline.name: baseline.record() for baseline in baselines},
        "best_baseline": None if best is None else best.name,
        "beats_baselines": None if comparison is None else comparison.verdict == "better",
        "comparison": None if comparison is None else asdict(comparison),
    }
