"""The page of a fine-tuned model: scores with their spread, baselines, and the worst mistakes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.errors import DataError
from discern.model_files.finetuned import CONFIG_FILE, RESULTS_FILE, read_results, seed_folder
from discern.parsing import is_number
from discern.report.page import Page, Table, TaggedTexts, entity_pieces, render_page
from discern.report.predictions import confusion, read_judged, reliability
from discern.storage.checksums import read_lines, read_text, understood
from discern.storage.files import write_text
from discern.storage.output import check_output
from discern.tasks.baselines import comparison_sentence
from discern.wording import counted

REPORT_FILE = "report.html"

_WORST = 10
_READ = 10_000  # mistakes that are read for the summary
_LONGEST = 300  # characters of a cell


def report_finetuned(folder: Path, out: Path | None) -> Path:
    """Write the page of a fine-tuned model and return its path. The same results give the same bytes.

    Args:
        out: HTML file to write or replace; None: report.html in the folder.

    Raises:
        ConfigError: `out` is a folder, or lies inside the model's folder under another name.
        DataError: the fine-tuning is not finished, one of its files is damaged, or the page cannot be written.
    """
    target = out or folder / REPORT_FILE
    check_output("--out", target, REPORT_FILE, folder, own=(REPORT_FILE,))
    results = read_results(folder)
    tasks: Mapping[str, Any] = results.get("tasks", {results["task"]: results})
    hint = "remove it, then run the same `discern finetune` command: it writes it again"
    with understood(folder / RESULTS_FILE, hint=hint):
        facts, tables = _facts(results), [*_scores(tasks), *_baselines(tasks)]
    mistakes = {name: _mistakes(folder, results["best_seed"], name) for name in tasks}
    with understood(folder / RESULTS_FILE, hint=hint):
        verdict = [line for name, entry in tasks.items() for line in task_verdict(name, entry, mistakes[name].records)]
    judged = {
        name: read_judged(seed_folder(folder, results["best_seed"]), name, mistakes[name].records)
        for name in tasks
        if results["best_seed"] is not None and mistakes[name].known and len(mistakes[name].records) < _READ
    }
    seed = f"seed {results['best_seed']}"
    calibrations = [reliability(f"Calibration on {name}, {seed}", found) for name, found in judged.items()]
    matrices = [confusion(f"Confusion on {name}, {seed}", found) for name, found in judged.items()]
    page = Page(
        title=f"discern: {folder.resolve().name}",
        verdict=[f"{_trained(results, tasks)} {verdict[0]}", *verdict[1:]],
        facts=facts,
        curves=[chart for chart in calibrations if chart is not None],
        confusions=[matrix for matrix in matrices if matrix is not None],
        tables=[*tables, *(each.table for each in mistakes.values() if each.table is not None)],
        tagged=[each.tagged for each in mistakes.values() if each.tagged is not None],
        configuration=read_text(folder / CONFIG_FILE, hint="restore it from a copy, or fine-tune again with another --out"),
        notes=["Scores are fractions in 0-1; correlations are in -1 to 1. The median of the seeds is the number to report."],
    )
    try:
        write_text(target, render_page(page))
    except OSError as problem:
        raise DataError(
            f"cannot write {target}: {problem.strerror or problem}", hint="choose a file that you can write to: --out FILE.html"
        ) from problem
    return target


def _trained(results: Mapping[str, Any], tasks: Mapping[str, Any]) -> str:
    """A sentence about what was trained."""
    seeds = len(results["seeds"])
    on = " and ".join(
        f"{name} ({counted(entry['train_examples'], 'example')})" if is_number(entry.get("train_examples")) else name
        for name, entry in tasks.items()
    )
    return f"Fine-tuned from {Path(results['model']).name} on {on}, with {counted(seeds, 'seed')}."


def _facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = results["settings"]
    steps = f"{settings['train.max_steps']:,}, each of {settings['train.sequences_per_step']} rows"
    if results["kept_step"]:
        steps += f": {results['passes']:.1f} passes; the weights are those of step {results['kept_step']:,}"
    return [
        ("Model", results["model"]),
        ("Recipe", settings["finetune.recipe"]),
        ("Seeds", ", ".join(map(str, results["seeds"]))),
        ("Steps per seed", "none: the encoder is not trained" if settings["finetune.few_shot"] else steps),
        ("Peak learning rate", f"{settings['optimizer.learning_rate']:g}{_layer_decay(settings['optimizer.layer_decay'])}"),
        ("Time in training", f"{results['seconds']:,.0f} seconds"),
        ("Made with", f"discern {results['discern']}"),
    ]


def _layer_decay(factor: float) -> str:
    return "" if factor == 1 else f", times {factor:g} for each layer from the top down"


def _scores(tasks: Mapping[str, Any]) -> Iterator[Table]:
    rows: list[list[str | float]] = []
    notes = []
    for name, entry in tasks.items():
        if entry["median"] is not None:
            deviation = entry["standard_deviation"]
            several = deviation is not None
            shown = (f"+- {deviation:.4f}", f"{entry['worst']:.4f} to {entry['best']:.4f}") if several else ("", "")
            rows.append([name, entry["metric"], entry["median"], *shown, _split(entry)])
        rows += [
            [name, metric, value, "", "", _split(entry)]
            for metric, value in entry["metrics"].items()
            if metric != entry["metric"]
        ]
        notes += [f"{name}, seed {seed} failed: {reason}." for seed, reason in entry["failed_seeds"].items()]
    yield Table(
        "Scores", ("Task", "Metric", "Median of the seeds", "Standard deviation", "Range", "Measured on"), rows, " ".join(notes)
    )


def _baselines(tasks: Mapping[str, Any]) -> Iterator[Table]:
    """Scores of simple predictors on the same examples; no table if there are none."""
    rows: list[list[str | float]] = [
        [each["title"], name, entry["metric"], each["metrics"][entry["metric"]], f"{each['train_examples']:,}"]
        for name, entry in tasks.items()
        for each in (entry.get("baselines") or {}).values()
    ]
    verdicts = [(name, comparison_sentence(entry)) for name, entry in tasks.items()]
    note = " ".join(f"{name}: {verdict}" if len(tasks) > 1 else verdict for name, verdict in verdicts if verdict)
    if rows:
        yield Table("Baselines", ("Baseline", "Task", "Metric", "Score", "Trained on"), rows, note)


def _split(entry: Mapping[str, Any]) -> str:
    chosen = ", on which the weights were selected" if entry.get("selected_on") == entry["split"] else ""
    return f"{entry['split']}, {counted(entry['examples'], 'example')}{chosen}"


@dataclass(frozen=True)
class _Mistakes:
    """Mistakes of a seed, worst first; the worst as a table or, for tagging, as texts with their entities.

    Attributes:
        known: False: their file is missing, so the seed may have made some.
    """

    records: list[dict[str, Any]]
    known: bool = True
    table: Table | None = None
    tagged: TaggedTexts | None = None


def _mistakes(folder: Path, seed: int | None, name: str) -> _Mistakes:
    path = seed_folder(folder, seed) / f"mistakes-{name}.jsonl" if seed is not None else None
    if path is None or not path.is_file():
        return _Mistakes([], known=False)
    title = f"Worst mistakes of seed {seed}: {name}"
    hint = f"remove it for a page without mistakes; to create it again, remove {path.parent} and fine-tune again"
    with understood(path, hint=hint):
        records = read_lines(path, hint=hint)[:_READ]
        rows: list[list[str | float]] = []
        texts = []
        for record in records[:_WORST]:
            if "words" in record and "tags" in record:
                texts.append(entity_pieces(record))
            else:
                rows.append([_text(record), _short(record["gold"]), _predicted(record), float(record["badness"])])
    table = Table(title, ("Text", "Gold", "Predicted", "Badness"), rows) if rows else None
    return _Mistakes(records, table=table, tagged=TaggedTexts(title, texts) if texts else None)


def _text(record: Mapping[str, Any]) -> str:
    return _short(" / ".join(str(record[key]) for key in ("text", "pair", "context") if key in record))


def _predicted(record: Mapping[str, Any]) -> str:
    for key in ("label", "labels", "score", "answer", "tags", "similarity", "found"):
        if key in record:
            return _short(record[key])
    return ""


def _short(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def task_verdict(name: str, entry: Mapping[str, Any], mistakes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences about a fine-tuned model on one task.

    Args:
        entry: entry of the task in results.json.
        mistakes: the mistakes of the best seed, the worst first, up to `_READ`.
    """
    if entry["median"] is None:
        return [f"{name}: no seed has a score; all seeds failed."]
    interval = "" if entry.get("interval") is None else ", 95 % interval {:.3f} to {:.3f}".format(*entry["interval"])
    metric, examples = entry["metric"].replace("_", " "), counted(entry["examples"], "example")
    found = (
        f"{name}: {metric} {entry['median']:.3f} on {examples} ({entry['split']}{interval}). {comparison_sentence(entry) or ''}"
    )
    return [found.rstrip(), *_kinds_of_mistakes(entry, mistakes)]


def _kinds_of_mistakes(entry: Mapping[str, Any], mistakes: Sequence[Mapping[str, Any]]) -> list[str]:
    metrics = entry["metrics"]
    worst = "the worst " if len(mistakes) == _READ else ""  # there may be more
    found = []
    if {"precision", "recall"} <= metrics.keys():
        found.append(
            f"It finds {metrics['recall']:.0%} of the spans, and {metrics['precision']:.0%} of the spans it marks are correct."
        )
    confusions = Counter(
        (str(each["gold"]), str(each["label"])) for each in mistakes if isinstance(each.get("label"), str) and "gold" in each
    )
    if confusions:
        ((gold, predicted), count), *_ = confusions.most_common(1)
        of = f"{count:,} of {worst}{counted(len(mistakes), 'mistake')}"
        found.append(f"The most frequent mistake: '{gold}' predicted as '{predicted}' ({of}).")
    kinds = Counter(str(span[2]) for each in mistakes for span in each.get("missed", ()))
    if kinds:
        (kind, count), *_ = kinds.most_common(1)
        among = f" in the worst {_READ:,} mistakes" if worst else ""
        found.append(f"Most often missed: {kind} ({count:,} of {counted(sum(kinds.values()), 'missed span')}{among}).")
    return found
