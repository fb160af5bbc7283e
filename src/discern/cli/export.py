"""`discern export`: a network of a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from discern.cli.console import JsonOption, command


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run; its newest sound checkpoint is taken.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder, or an earlier export, which is replaced.")],
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="NAME", help="discriminator (the default), generator; encoder of a run of 'mlm'."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Write a network of a run, with its tokenizer and a model card, as a folder that transformers loads.

    Example: discern export runs/first --out my-encoder
    """
    with command(json_output=json_output) as console:
        from discern.workflows.export import export as run_export

        done = run_export(run, out, network, console.progress, console.warn)
        values = {
            "out": done.folder,
            "network": done.network,
            "architecture": done.architecture,
            "parameters": done.parameters,
            "step": done.step,
        }
        text = (
            f"{done.folder}: the {done.network} at step {done.step:,}, {done.parameters:,} parameters\n"
            f"  AutoTokenizer.from_pretrained({str(done.folder)!r})\n"
            f"  {done.architecture}.from_pretrained({str(done.folder)!r})\n"
            "Fill in the licence in README.md before you publish it."
        )
        console.result(values, text=text)
