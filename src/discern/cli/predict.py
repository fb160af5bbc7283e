"""`discern predict`: a fine-tuned model applied to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from discern.cli.console import JsonOption, command
from discern.cli.options import DeviceOption
from discern.wording import counted

_COLUMNS = ("text", "pair", "words", "question", "context")


def _column(what: str) -> Any:
    return typer.Option(metavar="COLUMN", help=what, rich_help_panel="Columns of a table", show_default=False)


TextColumn = Annotated[str | None, _column("Column of the text (default: as in the training file).")]
PairColumn = Annotated[str | None, _column("Column of the second text.")]
WordsColumn = Annotated[str | None, _column("Column of the words to tag; for CoNLL columns its index, from 0.")]
QuestionColumn = Annotated[str | None, _column("Column of the question.")]
ContextColumn = Annotated[str | None, _column("Column of the text that contains the answer.")]


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Output of 'discern finetune', an export of it, or a Hugging Face model for such a task (folder or name on the "
            "Hub).",
        ),
    ],
    input: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="CSV, TSV, JSON lines, Parquet, plain text (one text per line), or the task's own format; - reads stdin.",
        ),
    ],
    *,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write JSON lines to this file instead of stdout.")
    ] = None,
    append: Annotated[
        bool,
        typer.Option(
            "--append",
            help="Write the rows of the table INPUT to --out in its own format, with columns 'prediction' and 'probability'.",
        ),
    ] = False,
    task: Annotated[str | None, typer.Option("--task", metavar="NAME", help="Task to apply, if the model has several.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed whose weights are used (default: the best).")] = None,
    text: TextColumn = None,
    pair: PairColumn = None,
    words: WordsColumn = None,
    question: QuestionColumn = None,
    context: ContextColumn = None,
    format: Annotated[
        Literal["csv", "tsv", "jsonl", "json", "parquet", "text", "conll"] | None,
        typer.Option("--format", help="Format of INPUT (default: recognized by name and content)."),
    ] = None,
    logits: Annotated[bool, typer.Option("--logits", help="Include the logits in the output.")] = False,
    device: DeviceOption = "auto",
    precision: Annotated[
        Literal["float32", "bfloat16", "auto"], typer.Option("--precision", help="Floating-point type to compute in.")
    ] = "float32",
    json_output: JsonOption = False,
) -> None:
    """Apply a fine-tuned model to a file: one JSON line per row, in order, with its number from 0 (`row`) and its own `id`.

    Examples: discern predict OUT new-reviews.csv --out predictions.jsonl

    discern predict OUT new-reviews.csv --append --out labeled.csv

    echo "A fine film." | discern predict OUT -
    """
    with command(json_output=json_output) as console:
        model = console.local_model(model)
        from discern.inference.predict import predict as run

        given = dict(zip(_COLUMNS, (text, pair, words, question, context), strict=True))
        gathered: list[dict[str, Any]] = []
        done = run(
            model,
            input,
            gathered.extend if json_output else console.records,
            console.progress,
            out=out,
            task=task,
            seed=seed,
            columns={role: column for role, column in given.items() if column is not None},
            format=format,
            logits=logits,
            device=device,
            precision=precision,
            append=append,
        )
        rate = done.rows / max(done.seconds, 1e-9)
        values: dict[str, Any] = {"rows": done.rows, "seconds": done.seconds, "rows_per_second": rate}
        if out is not None:
            console.result(
                values | {"out": out}, text=f"{out}: {counted(done.rows, 'row')} in {done.seconds:.1f} s ({rate:,.0f} per second)"
            )
        elif json_output:
            console.result(values | {"predictions": gathered}, text="")
