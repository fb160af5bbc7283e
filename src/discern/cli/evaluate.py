"""`discern evaluate`: metrics of a run, an export or a fine-tuned model on held-out data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from discern.cli.console import Console, JsonOption, command
from discern.cli.finetune import baseline_lines, interval_text
from discern.cli.options import DeviceOption, refuse_together
from discern.cli.outputs import after_evaluate
from discern.errors import ConfigError
from discern.training.rank_environment import require_single_process
from discern.wording import counted

if TYPE_CHECKING:
    from rich.table import Table


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A run, an export with all its networks ('discern export RUN --out DIR --all-networks') or a fine-tuned model. "
            "With --suite also any other export, or a Hugging Face folder with a pre-training head.",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="Data set whose held-out split is used (default for a run: its own); for a fine-tuned model, a labeled file; "
            "with --suite, the folder of the suite.",
        ),
    ] = None,
    sequences: Annotated[
        int, typer.Option("--sequences", min=0, help="Number of held-out rows to evaluate on, evenly spaced; 0: all.")
    ] = 0,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, help="Rows per forward pass (default: 32). The metrics don't depend on it."),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME", help="Task to evaluate, if the fine-tuned model has several.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of a fine-tuned model whose weights are used (default: the best).")
    ] = None,
    suite: Annotated[
        Literal["blimp"] | None, typer.Option("--suite", help="Evaluate on minimal pairs instead: BLiMP, read from --data.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum number of pairs per paradigm (default: all).")
    ] = None,
    scorer: Annotated[
        list[str] | None,
        typer.Option(
            "--scorer", metavar="NAME", help="Scorer for --suite, as in 'discern score'; may be repeated.", show_default=False
        ),
    ] = None,
    device: DeviceOption = "auto",
    precision: Annotated[
        Literal["float32", "bfloat16"], typer.Option("--precision", help="Floating-point type to compute in.")
    ] = "float32",
    json_output: JsonOption = False,
) -> None:
    """Evaluate a model on held-out text, or a fine-tuned model on a labeled file. Losses are in nats, other metrics in 0-1.

    Examples: discern evaluate runs/first --data DATA

    discern evaluate OUT --data reviews-dev.csv

    discern evaluate runs/first --suite blimp --data blimp/data
    """
    with command(json_output=json_output) as console:
        require_single_process("an evaluation")
        model = console.local_model(model)
        if suite is not None:
            unread = {"--sequences": sequences > 0, "--batch-size": batch_size is not None, "--task": task is not None}
            refuse_together("--suite", unread | {"--seed": seed is not None, "--precision": precision != "float32"})
            from discern.inference.minimal_pairs import run_blimp

            found = run_blimp(model, data, console.progress, console.warn, limit=limit, scorers=scorer or (), device=device)
            _show_suite(console, found)
            return
        if limit is not None or scorer:
            raise ConfigError("--limit and --scorer are for suites of minimal pairs", hint="add --suite blimp, or leave them out")
        from discern.model_files.folder import holds_model, open_model
        from discern.model_files.run import is_run

        names_task = task is not None or seed is not None
        # A folder without any model is not a fine-tuned one either: wrong options are reported before a wrong folder.
        if (holds_model(model) or not names_task) and open_model(model, warn=console.warn).has_task_head:
            if sequences or batch_size is not None:
                raise ConfigError(f"--sequences and --batch-size are for runs, but {model} is fine-tuned", hint="leave them out")
            from discern.finetuning.evaluate import evaluate_finetuned
            from discern.model_files.finetuned import is_finetuned

            found = evaluate_finetuned(
                model, data, task=task, seed=seed, device=device, precision=precision, progress=console.progress
            )
            console.result(found, text=_text(found))
            if is_finetuned(model):
                console.print(after_evaluate(model, run=False))
            return
        if names_task:
            raise ConfigError(f"--task and --seed are for fine-tuned models, but {model} is not one", hint="leave them out")
        from discern.pretraining.evaluate import evaluate as measure

        metrics = measure(
            model,
            data=data,
            sequences=sequences,
            batch_size=batch_size or 32,
            device=device,
            precision=precision,
            progress=console.progress,
            warn=console.warn,
        )
        lines = [f"  {name:<26} {value:.4f}" for name, value in metrics.items() if isinstance(value, float)]
        by_source = metrics.get("heldout_by_source", {})
        lines += [f"  {f'loss of {name}':<26} {each['heldout_loss']:.4f}" for name, each in by_source.items()]
        if "calibration" in metrics:
            lines.append(f"  {'calibration_error':<26} {metrics['calibration']['expected_calibration_error']:.4f}")
        console.result(
            metrics, text="\n".join([f"{model} at step {metrics['step']:,}, {counted(metrics['rows'], 'held-out row')}", *lines])
        )
        for title, key in (("occurrences per million tokens", "by_frequency"), ("part of the row", "by_position")):
            console.print("")
            console.print(_groups(title, metrics[key]))
        if is_run(model):
            console.print(after_evaluate(model, run=True))


def _show_suite(console: Console, found: dict[str, Any]) -> None:
    """Show accuracies on minimal pairs, one column per scorer: overall, by phenomenon and by paradigm."""
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
    """The headline metric, then the others."""
    others = {name: value for name, value in found["metrics"].items() if name != found["metric"]} | {"loss": found["loss"]}
    lines = [
        f"{found['task']}: {found['metric']} {found['score']:.4f} on {found['file']} ({counted(found['examples'], 'example')}"
        f"{interval_text(found)})"
    ]
    lines += [f"  {name:<26} {value:.4f}" for name, value in others.items()]
    return "\n".join([*lines, *baseline_lines(found)])


def _groups(title: str, rows: list[dict[str, Any]]) -> Table:
    """Metrics of each group of tokens; missing ones are left blank."""
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row if name != "group"))
    table = Table(title, *(name.replace("discriminator_", "").replace("_", " ") for name in names))
    for row in rows:
        table.add_row(row["group"], *(_cell(row.get(name)) for name in names))
    return table


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
