"""A fine-tuning as one HTML page: scores with their spread, published ones beside, and the worst mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.artifacts.files import write_text
from discern.artifacts.guard import check_output
from discern.errors import DataError
from discern.records import parse_json, read_text, understood
from discern.report.page import Page, Table, render_page
from discern.report.tagged import TaggedTexts, marked
from discern.report.verdict import task_verdict
from discern.tasks.published import published_scores
from discern.workflows.baselines import verdict
from discern.workflows.finetuned import CONFIG_FILE, RESULTS_FILE, read_results, seed_folder

REPORT_FILE = "report.html"

_WORST = 10
_READ = 10_000  # mistakes that are counted by kind
_LONGEST = 300


def report_finetuned(folder: Path, out: Path | None) -> Path:
    """Write the page; gives the file. The same results give the same bytes.

    Args:
        out: HTML file, replaced where it stands; None: report.html in the folder.

    Raises:
        ConfigError: `out` is a folder, or lies inside the fine-tuning under another name.
        DataError: the fine-tuning is not finished, or the file cannot be written.
    """
    target = out or folder / REPORT_FILE
    check_output("--out", target, REPORT_FILE, folder, own=(REPORT_FILE,))
    results = read_results(folder)
    tasks: Mapping[str, Any] = results.get("tasks", {results["task"]: results})
    hint = "remove it, then run the same `discern finetune` command: it writes it again"
    with understood(folder / RESULTS_FILE, hint=hint):
        facts, tables = _facts(results), [*_scores(tasks), *_baselines(tasks), *_published(tasks)]
    mistakes = {name: _mistakes(folder, results["best_seed"], name) for name in tasks}
    with understood(folder / RESULTS_FILE, hint=hint):
        said = [
            line for name, entry in tasks.items() for line in task_verdict(name, entry, mistakes[name].records, verdict(entry))
        ]
    page = Page(
        title=f"discern: {folder.resolve().name}",
        verdict=said,
        facts=facts,
        curves=(),
        tables=[*tables, *(each.table for each in mistakes.values() if each.table is not None)],
        tagged=[each.tagged for each in mistakes.values() if each.tagged is not None],
        configuration=read_text(folder / CONFIG_FILE, hint="copy it back, or fine-tune again with another --out"),
        notes=["Scores are fractions in 0-1; correlations in -1 to 1. The median of the seeds is the figure to quote."],
    )
    try:
        write_text(target, render_page(page))
    except OSError as problem:
        raise DataError(
            f"cannot write {target}: {problem.strerror or problem}", hint="choose a file that you can write to: --out FILE.html"
        ) from problem
    return target


def _facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = results["settings"]
    return [
        ("Model", results["model"]),
        ("Recipe", settings["finetune.recipe"]),
        ("Seeds", ", ".join(map(str, results["seeds"]))),
        ("Steps a seed", f"{settings['train.max_steps']:,} of {settings['train.sequences_per_step']} rows"),
        (
            "Peak learning rate",
            f"{settings['optimizer.learning_rate']:g}, a factor of {settings['optimizer.layer_decay']:g} a layer",
        ),
        ("Time in training", f"{results['seconds']:,.0f} seconds"),
        ("Made with", f"discern {results['discern']}"),
    ]


def _scores(tasks: Mapping[str, Any]) -> Iterator[Table]:
    rows: list[list[str | float]] = []
    notes = []
    for name, entry in tasks.items():
        if entry["median"] is not None:
            spread = f"{entry['worst']:.4f} to {entry['best']:.4f}"
            rows.append([name, entry["metric"], entry["median"], f"+- {entry['standard_deviation']:.4f}", spread, _split(entry)])
        rows += [
            [name, metric, value, "", "", _split(entry)]
            for metric, value in entry["metrics"].items()
            if metric != entry["metric"]
        ]
        notes += [f"{name}, seed {seed} failed: {reason}." for seed, reason in entry["failed_seeds"].items()]
    yield Table("Scores", ("Task", "Metric", "Median of the seeds", "Deviation", "Range", "Measured on"), rows, " ".join(notes))


def _baselines(tasks: Mapping[str, Any]) -> Iterator[Table]:
    """What simple predictors score on the same examples; nothing where none were measured."""
    rows: list[list[str | float]] = [
        [each["title"], name, entry["metric"], each["metrics"][entry["metric"]], f"{each['train_examples']:,}"]
        for name, entry in tasks.items()
        for each in (entry.get("baselines") or {}).values()
    ]
    verdicts = [(name, verdict(entry)) for name, entry in tasks.items()]
    note = " ".join(f"{name}: {said}" if len(tasks) > 1 else said for name, said in verdicts if said)
    if rows:
        yield Table("Baselines", ("Baseline", "Task", "Metric", "Score", "Trained on"), rows, note)


def _split(entry: Mapping[str, Any]) -> str:
    chosen = ", on which the weights were chosen" if entry.get("selected_on") == entry["split"] else ""
    return f"{entry['split']}, {entry['examples']:,} examples{chosen}"


def _published(tasks: Mapping[str, Any]) -> Iterator[Table]:
    rows: list[list[str | float]] = []
    for name, entry in tasks.items():
        rows += [
            [
                each.model,
                name,
                each.metric,
                each.value,
                each.split,
                each.seeds,
                f"{each.flops:.1e}" if each.flops else "-",
                each.source,
                each.note,
            ]
            for each in published_scores(name)
            if each.metric in entry["metrics"]
        ]
    if rows:
        columns = ("Model", "Task", "Metric", "Score", "Split", "Seeds", "FLOPs of pre-training", "Source", "Note")
        note = "Numbers of other splits, seeds, data or compute are not comparable; they are here to show the scale."
        yield Table("Published scores", columns, rows, note)


@dataclass(frozen=True)
class _Mistakes:
    """What a seed got wrong, worst first; the worst as a table, or of tagging as texts with their entities marked."""

    records: list[dict[str, Any]]
    table: Table | None = None
    tagged: TaggedTexts | None = None


def _mistakes(folder: Path, seed: int | None, name: str) -> _Mistakes:
    path = seed_folder(folder, seed) / f"mistakes-{name}.jsonl" if seed is not None else None
    if path is None or not path.is_file():
        return _Mistakes([])
    title = f"Worst mistakes of seed {seed}: {name}"
    hint = f"remove it for a page without mistakes; to write it again, remove {path.parent} and fine-tune again"
    lines = read_text(path, hint=hint).splitlines()[:_READ]
    with understood(path, hint=hint):
        records: list[dict[str, Any]] = [parse_json(line, path, hint=hint) for line in lines]
        rows: list[list[str | float]] = []
        texts = []
        for record in records[:_WORST]:
            if "words" in record and "tags" in record:
                texts.append(marked(record))
            else:
                rows.append([_text(record), _short(record["gold"]), _said(record), float(record["badness"])])
    table = Table(title, ("Text", "Gold", "Said", "Badness"), rows) if rows else None
    return _Mistakes(records, table, TaggedTexts(title, texts) if texts else None)


def _text(record: Mapping[str, Any]) -> str:
    return _short(" / ".join(str(record[key]) for key in ("text", "pair", "context") if key in record))


def _said(record: Mapping[str, Any]) -> str:
    for key in ("label", "labels", "score", "answer", "tags"):
        if key in record:
            return _short(record[key])
    return ""


def _short(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
