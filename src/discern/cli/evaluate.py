"""`discern evaluate`: held-out figures of a run or an export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from discern.cli.console import JsonOption, command


def evaluate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A run, or what 'discern export RUN --out DIR --all-networks' wrote.")
    ],
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DATA", help="Data set whose held-out part is used; a run knows its own.")
    ] = None,
    sequences: Annotated[int, typer.Option("--sequences", min=0, help="Held-out rows, evenly spread; 0: all.")] = 0,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Rows a forward pass; the figures don't depend on it.")
    ] = 32,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, ...")] = "auto",
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option("--precision", help="Arithmetic.")] = "float32",
    json_output: JsonOption = False,
) -> None:
    """Measure a model's networks on held-out text: losses in nats, everything else in 0-1.

    Example: discern evaluate runs/first --data DATA
    """
    with command(json_output=json_output) as console:
        from discern.workflows.evaluate import EvaluateRequest
        from discern.workflows.evaluate import evaluate as measure

        figures = measure(EvaluateRequest(model, data, sequences, batch_size, device, precision), console.progress, console.warn)
        lines = [f"  {name:<26} {value:.4f}" for name, value in figures.items() if isinstance(value, float)]
        console.result(
            figures, text="\n".join([f"{model} at step {figures['step']:,}, {figures['rows']:,} held-out rows", *lines])
        )
