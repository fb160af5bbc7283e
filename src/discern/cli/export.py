"""`discern export`: networks of a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from discern.cli.console import JsonOption, command

if TYPE_CHECKING:
    from discern.workflows.export import Exported


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run; its newest sound checkpoint is taken.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder, or an earlier export, which is replaced.")],
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="NAME", help="discriminator (the default), generator; encoder of a run of 'mlm'."),
    ] = None,
    all_networks: Annotated[
        bool,
        typer.Option("--all-networks", help="Add the generator, in a folder of its own, so that 'discern evaluate' takes DIR."),
    ] = False,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option("--precision", help="Type that the weights are stored in.")
    ] = "float32",
    json_output: JsonOption = False,
) -> None:
    """Write a network of a run, with its tokenizer and a model card, as a folder that transformers loads.

    Example: discern export runs/first --out my-encoder
    """
    with command(json_output=json_output) as console:
        from discern.workflows.export import ExportRequest
        from discern.workflows.export import export as run_export

        done = run_export(ExportRequest(run, out, network, all_networks, precision), console.progress, console.warn)
        values = {
            "out": done.folder,
            "network": done.networks[0],
            "networks": done.networks,
            "architecture": done.architecture,
            "parameters": done.parameters,
            "precision": precision,
            "step": done.step,
            "bytes": done.num_bytes,
        }
        console.result(values, text=_text(done, precision))


def _text(done: Exported, precision: str) -> str:
    """What was written, and how to load it."""
    folder, (first, *others) = str(done.folder), done.networks
    lines = [
        f"{folder}: the {first} at step {done.step:,}, {done.parameters:,} parameters in {precision}, "
        f"{done.num_bytes / 1e6:,.1f} MB in all",
        f"  AutoTokenizer.from_pretrained({folder!r})",
        f"  {done.architecture}.from_pretrained({folder!r})",
    ]
    if others:
        lines.append(f"  discern evaluate {folder} --data DATA (with {', '.join(f'{folder}/{name}' for name in others)})")
    return "\n".join([*lines, "Fill in the licence in README.md before you publish it."])
