"""`discern finetune`: train a pre-trained encoder on a labeled task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from discern.cli.console import JsonOption, command
from discern.cli.options import FOREIGN, DeviceOption, NprocOption, SetOption, launch_ranks
from discern.cli.outputs import after_finetune
from discern.wording import counted

_ADVICE = (
    "More labeled examples, a model pre-trained for longer, or one adapted to such text (discern adapt) may help; "
    "`discern finetune --sweep-rates` looks for a better learning rate."
)


def _column(what: str) -> Any:
    return typer.Option(metavar="COLUMN", help=what, rich_help_panel="A file of your own", show_default=False)


def _file(what: str) -> Any:
    return typer.Option(metavar="FILE", help=what, rich_help_panel="A file of your own", show_default=False)


TrainFile = Annotated[Path | None, _file("File to train on: CSV, TSV, JSON lines, Parquet, or CoNLL columns (.conll).")]
DevFile = Annotated[
    Path | None,
    _file(
        "File to evaluate on (default: a tenth of --train is held out); for pairs also a folder of queries and documents, or "
        "a file in its qrels."
    ),
]
TextColumn = Annotated[str | None, _column("Column of the text.")]
PairColumn = Annotated[str | None, _column("Column of a second text.")]
LabelColumn = Annotated[str | None, _column("Column of the class, the number, or the list of classes.")]
LabelSeparator = Annotated[
    str | None,
    typer.Option(
        metavar="MARK",
        help="Mark between several labels in one cell, such as ';'.",
        rich_help_panel="A file of your own",
        show_default=False,
    ),
]
WordsColumn = Annotated[str | None, _column("Column of the words to tag; for CoNLL columns its index, from 0.")]
TagsColumn = Annotated[str | None, _column("Column of the tags, or its index; -1 is the last column.")]
QuestionColumn = Annotated[str | None, _column("Column of the question.")]
ContextColumn = Annotated[str | None, _column("Column of the text that contains the answer.")]
AnswerColumn = Annotated[str | None, _column("Column of the answer.")]


def finetune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"A run, an export, a fine-tuned model (its encoder is trained further), {FOREIGN}, or a preset.",
        ),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="OUT", help="Output folder; interrupted work in it is continued.")],
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="NAME",
            help="Name of a task. May be repeated; the tasks are then trained together. 'pairs' trains text embeddings on "
            "--train.",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", metavar="DIR", help="Folder of the task's files; repeat it once for each --task."),
    ] = None,
    train: TrainFile = None,
    dev: DevFile = None,
    text: TextColumn = None,
    pair: PairColumn = None,
    label: LabelColumn = None,
    label_separator: LabelSeparator = None,
    words: WordsColumn = None,
    tags: TagsColumn = None,
    question: QuestionColumn = None,
    context: ContextColumn = None,
    answer: AnswerColumn = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="TOML", help="Settings that override the recipe.")] = None,
    set_: SetOption = None,
    recipe: Annotated[
        Literal["auto", "paper", "google"],
        typer.Option(
            "--recipe",
            help="auto: fit the length to the data, and extract answers with a head that transformers has. paper: settings of "
            "the ELECTRA paper. google: settings of the released code.",
        ),
    ] = "auto",
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Number of random seeds to train with; reports median and spread.")
    ] = 1,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Start from random weights instead of the model's, for comparison.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="PATH", help="Tokenizer to use if MODEL is a preset.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="KEY=VALUE,VALUE", help="Train once with each value. May be repeated; trains all combinations."
        ),
    ] = None,
    sweep_rates: Annotated[
        bool, typer.Option("--sweep-rates", help="First choose the learning rate by short training runs.")
    ] = False,
    submission: Annotated[
        Path | None,
        typer.Option("--submission", metavar="DIR", help="Folder to write the zip file to that the GLUE site accepts."),
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Also evaluate simple baselines (TF-IDF, perceptron, ...).")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another fine-tuning in OUT.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Use only a hundred examples of each file, for a quick trial.")] = False,
    device: DeviceOption = "auto",
    nproc: NprocOption = 1,
    json_output: JsonOption = False,
) -> None:
    """Fine-tune an encoder on a task or on a labeled file of your own.

    Examples: discern finetune MODEL --task sst2 --data glue/SST-2 --out OUT --seeds 3

    discern finetune MODEL --train reviews.csv --text review --label stars --out OUT

    discern finetune MODEL --task pairs --train pairs.csv --dev judged.csv --out OUT
    """
    with command(json_output=json_output, trains=True) as console:
        from discern.api.arguments import requested_tasks

        files = {"train": train, "dev": dev, "text": text, "pair": pair, "label": label, "label_separator": label_separator}
        files |= {"words": words, "tags": tags, "question": question, "context": context, "answer": answer}
        tasks, own = requested_tasks(task or (), data or (), files)
        launch_ranks(nproc)
        from discern.finetuning.run import finetune as fine_tune

        results = fine_tune(
            model,
            out=out,
            tasks=tasks,
            config=config,
            overrides=(*own, *(("finetune.rate_search=true",) if sweep_rates else ()), *(set_ or ())),
            recipe=recipe,
            seeds=seeds,
            untrained=untrained,
            tokenizer=tokenizer,
            sweep=sweep or (),
            submission=submission,
            baselines=baselines,
            overwrite=overwrite,
            debug=debug,
            device=device,
            progress=console.progress,
        )
        console.result(results, text=_sweep_text(results, out) if sweep else _text(results, out))
        if results["median"] is None:
            console.fail()


def _sweep_text(results: dict[str, Any], out: Path) -> str:
    """One line per combination, then the results of the best one."""
    width = max(len(row["folder"]) for row in results["sweep"])
    lines = [f"{'setting':<{width}}  median {results['metric']}  standard deviation"]
    for row in results["sweep"]:
        median = "-" if row["median"] is None else f"{row['median']:.4f}"
        if row["standard_deviation"] is not None:
            median += f" +- {row['standard_deviation']:.4f}"
        failed = f"  ({len(row['failed_seeds'])} failed)" if row["failed_seeds"] else ""
        lines.append(f"{row['folder']:<{width}}  {median}{failed}")
    chosen = results["chosen_on"]
    lines.append(f"best: {results['best_folder']}")
    if chosen:
        lines.append(f"  selected by its scores on {chosen}, so these are slightly optimistic")
    return "\n".join([*lines, _text(results, out / results["best_folder"])])


def _text(results: dict[str, Any], out: Path) -> str:
    """Text of the results: for each task the headline metric with its spread, the other metrics, and failed seeds."""
    lines = []
    for entry in results.get("tasks", {results["task"]: results}).values():
        lines += _task_lines(entry, len(results["seeds"]))
    if results.get("kept_step"):
        lines.append(
            f"{results['passes']:.1f} passes over the training rows, weights of step {results['kept_step']:,}; "
            f"padding: {results['padding_fraction']:.1%} of the positions in the batches"
        )
    if results["median"] is None:
        lines.append("every seed failed: try a lower learning rate (--set optimizer.learning_rate=...) and another --out")
    else:
        lines.append(after_finetune(out, list(results.get("tasks", {})), embeds=results["settings"].get("files.task") == "pairs"))
    return "\n".join(lines)


def baseline_lines(entry: Mapping[str, Any]) -> list[str]:
    """One line per baseline, and their comparison with the score."""
    from discern.tasks.baselines import comparison_sentence

    metric, baselines = entry["metric"], entry.get("baselines") or {}
    lines = [f"  baseline {each['metrics'][metric]:.4f}, {each['title']}" for each in baselines.values()]
    sentence = comparison_sentence(entry)
    if sentence and not entry["beats_baselines"]:
        sentence += f" {_ADVICE}"
    return [*lines, *([f"  {sentence}"] if sentence else [])]


def interval_text(entry: Mapping[str, Any]) -> str:
    """The 95 % interval of a score, in words; empty without one."""
    return "" if entry.get("interval") is None else "; 95 % interval {:.4f} to {:.4f}".format(*entry["interval"])


def _task_lines(entry: dict[str, Any], seeds: int) -> list[str]:
    examples = f"{counted(entry['examples'], 'example')}{interval_text(entry)}"
    if entry["median"] is None:
        lines = [f"{entry['task']}: no seed has a score"]
    elif seeds == 1:
        lines = [f"{entry['task']}: {entry['metric']} {entry['median']:.4f} on {entry['split']} ({examples})"]
    else:
        deviation = entry["standard_deviation"]  # None if all seeds but one have failed
        spread = "" if deviation is None else f", standard deviation {deviation:.4f}"
        lines = [
            f"{entry['task']}: median {entry['metric']} {entry['median']:.4f} of {seeds} seeds on {entry['split']} "
            f"({examples}); mean {entry['mean']:.4f}{spread}, best {entry['best']:.4f}"
        ]
    lines += [f"  {name:<26} {value:.4f}" for name, value in entry["metrics"].items() if name != entry["metric"]]
    lines += baseline_lines(entry)
    if entry.get("selected_on") == entry["split"]:
        lines.append(f"  the weights of each seed were selected on {entry['split']}, so its scores are slightly optimistic")
    for seed, reasons in (entry.get("retried_seeds") or {}).items():
        times = "once" if len(reasons) == 1 else f"{len(reasons)} times"
        lines.append(f"  seed {seed}: retried {times} ({reasons[-1]})")
    return [*lines, *(f"  seed {seed} failed: {reason}" for seed, reason in entry["failed_seeds"].items())]
