"""`discern fill`: predict the tokens at the masks of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from discern.cli.console import JsonOption, command, typed_text
from discern.cli.options import DeviceOption


def fill(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A run, an export, or a Hugging Face model that predicts masked tokens (folder or name on the Hub).",
        ),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Text with [MASK] in place of each token to predict.")],
    top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="Number of predictions per mask.")] = 5,
    device: DeviceOption = "auto",
    json_output: JsonOption = False,
) -> None:
    """Print the most likely tokens at each [MASK] in a text, with their probabilities.

    Example: discern fill runs/first "The [MASK] sat on the mat."
    """
    with command(json_output=json_output) as console:
        text = typed_text(text, "TEXT")
        model = console.local_model(model)
        from discern.inference.fill import fill as run_fill

        found = run_fill(model, text, top, console.warn, device, console.progress.note)
        lists = [[{"token": each.token, "text": each.text, "probability": each.probability} for each in mask] for mask in found]
        if json_output:
            console.result({"text": text, "predictions": lists[0] if len(lists) == 1 else lists}, text="")
        for number, mask in enumerate(found, 1):
            table = Table("probability", "token" if len(found) == 1 else f"token at mask {number}")
            table.columns[0].justify = "right"
            for each in mask:
                table.add_row(f"{each.probability:.4f}", Text(each.shown))
            console.print(table)
