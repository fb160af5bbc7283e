"""`discern evaluate`: held-out figures of a run or an export, or the metrics of a fine-tuned model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from discern.cli.console import Console, JsonOption, command
from discern.cli.finetune import baseline_lines
from discern.cli.next_steps import after_evaluate
from discern.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A run, what 'discern export RUN --out DIR --all-networks' wrote, or what 'discern finetune' did; with --suite "
            "also any other export, or a Hugging Face ELECTRA.",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="Data set whose held-out part is used; a run knows its own. For a fine-tuned model a labelled file, for a suite "
            "its folder.",
        ),
    ] = None,
    sequences: Annotated[int, typer.Option("--sequences", min=0, help="Held-out rows, evenly spread; 0: all.")] = 0,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, help="Rows a forward pass, 32 unless given; the figures don't depend on it."),
    ] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="NAME", help="Of a fine-tuned model with several.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of a fine-tuned model: whose weights; without it the best.")] = None,
    suite: Annotated[
        Literal["blimp"] | None, typer.Option("--suite", help="Judge minimal pairs instead: BLiMP, read from --data.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Of a suite: pairs of each paradigm; without it all.")
    ] = None,
    scorer: Annotated[
        list[str] | None,
        typer.Option("--scorer", metavar="NAME", help="Of a suite: as of 'discern score'; may be repeated.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, ...")] = "auto",
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option("--precision", help="Arithmetic.")] = "float32",
    json_output: JsonOption = False,
) -> None:
    """Measure a model's networks on held-out text, or a fine-tuned model on a labelled file: losses in nats, the rest in 0-1.

    Examples: discern evaluate runs/first --data DATA

    discern evaluate OUT --data reviews-dev.csv

    discern evaluate runs/first --suite blimp --data blimp/data
    """
    with command(json_output=json_output) as console:
        model = console.local_model(model)
        if suite is not None:
            unread = {"--sequences": sequences > 0, "--batch-size": batch_size is not None, "--task": task is not None}
            _no_others("--suite", unread | {"--seed": seed is not None, "--precision": precision != "float32"})
            from discern.workflows.suite import SuiteRequest, run_blimp

            of_suite = SuiteRequest(model, data, limit, scorer or (), device)
            _show_suite(console, run_blimp(of_suite, console.progress, console.warn))
            return
        if limit is not None or scorer:
            raise ConfigError("--limit and --scorer are for suites of minimal pairs", hint="add --suite blimp, or leave them out")
        from discern.workflows.runs import is_run
        from discern.workflows.task_models import holds_task

        if holds_task(model):
            if sequences:
                raise ConfigError("--sequences is for runs; a fine-tuned model is judged on the whole file", hint="leave it out")
            if batch_size is not None:
                raise ConfigError(
                    "--batch-size is for runs; a fine-tuned model takes as many rows at once as hold some thousand tokens",
                    hint="leave it out",
                )
            from discern.workflows.evaluate_finetuned import JudgeRequest, judge

            found = judge(JudgeRequest(model, data, task, seed, device, precision), console.progress)
            console.result(found, text=_text(found))
            console.print(after_evaluate(model, run=False))
            return
        if task is not None or seed is not None:
            raise ConfigError(f"--task and --seed are for fine-tuned models, and {model} is none", hint="leave them out")
        from discern.workflows.evaluate import EvaluateRequest
        from discern.workflows.evaluate import evaluate as measure

        request = EvaluateRequest(model, data, sequences, batch_size or 32, device, precision)
        figures = measure(request, console.progress, console.warn)
        lines = [f"  {name:<26} {value:.4f}" for name, value in figures.items() if isinstance(value, float)]
        if "calibration" in figures:
            lines.append(f"  {'calibration_error':<26} {figures['calibration']['expected_calibration_error']:.4f}")
        console.result(
            figures, text="\n".join([f"{model} at step {figures['step']:,}, {figures['rows']:,} held-out rows", *lines])
        )
        for title, key in (("occurrences in a million", "by_frequency"), ("part of the row", "by_position")):
            console.print("")
            console.print(_groups(title, figures[key]))
        if is_run(model):
            console.print(after_evaluate(model, run=True))


def _no_others(option: str, others: Mapping[str, bool]) -> None:
    """Raise where options were given that say nothing beside this one."""
    given = " and ".join(name for name, is_given in others.items() if is_given)
    if given:
        raise ConfigError(f"{given} cannot be combined with {option}", hint=f"leave out {given}")


def _show_suite(console: Console, found: dict[str, Any]) -> None:
    """Accuracies of minimal pairs, a column a scorer: overall, by phenomenon, by paradigm."""
    from rich.table import Table

    by_scorer = found["by_scorer"]
    lines = [
        f"{name}: {each['accuracy']:.4f} of {each['pairs']:,} pairs ranked correctly; ties, counted as one half: {each['ties']:,}"
        for name, each in by_scorer.items()
    ]
    console.result(found, text="\n".join(lines))
    for title, key in (("phenomenon", "by_phenomenon"), ("paradigm", "by_paradigm")):
        table = Table(title, *by_scorer)
        for group in found[key]:
            table.add_row(group, *(_cell(each[key].get(group)) for each in by_scorer.values()))
        console.print("")
        console.print(table)


def _text(found: dict[str, Any]) -> str:
    """The headline, then the other figures."""
    others = {name: value for name, value in found["metrics"].items() if name != found["metric"]} | {"loss": found["loss"]}
    lines = [f"{found['task']}: {found['metric']} {found['score']:.4f} on {found['file']} ({found['examples']:,} examples)"]
    lines += [f"  {name:<26} {value:.4f}" for name, value in others.items()]
    return "\n".join([*lines, *baseline_lines(found)])


def _groups(title: str, rows: list[dict[str, Any]]) -> Table:
    """The figures of each group of tokens; what a group lacks is left blank."""
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row if name != "group"))
    table = Table(title, *(name.replace("discriminator_", "").replace("_", " ") for name in names))
    for row in rows:
        table.add_row(row["group"], *(_cell(row.get(name)) for name in names))
    return table


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
