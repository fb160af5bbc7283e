"""`discern import`: convert a Hugging Face or TensorFlow model to a folder that the other commands accept as a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from discern.cli.console import JsonOption, command
from discern.cli.options import FOREIGN
from discern.cli.outputs import shell_path

if TYPE_CHECKING:
    from discern.model_files.import_ import Imported


def import_(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE",
            help=f"The model: {FOREIGN}; or two, the discriminator and the generator of one model; or a checkpoint of the "
            "released TensorFlow code: model.ckpt-N.index, or its folder.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder, or an earlier import, which is replaced.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="A tokenizer.json, vocab.txt or SentencePiece model, or a folder (default: that of SOURCE).",
        ),
    ] = None,
    lowercase: Annotated[
        bool | None,
        typer.Option(
            "--lowercase/--cased",
            help="Whether to lower-case texts (default: as the files specify; for a bare vocab.txt, inferred from its entries).",
        ),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option("--heads", min=1, help="Attention heads of a TensorFlow model (default: hidden size / 64)."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Convert a Hugging Face or TensorFlow model, with its tokenizer, to a folder that the other commands accept as a model.

    TensorFlow is not required.

    Examples: discern import electra-small/model.ckpt-1000000.index --out models/theirs

    discern import hub/discriminator hub/generator --out models/both
    """
    with command(json_output=json_output) as console:
        from discern.model_files.import_ import import_model

        done = import_model(
            sources,
            out=out,
            tokenizer=tokenizer,
            lowercase=lowercase,
            heads=heads,
            progress=console.progress,
            warn=console.warn,
        )
        models = done.model.models
        first = next(iter(models.values()))
        values = {
            "out": done.folder,
            "kind": done.model.kind,
            "networks": list(models),
            "architecture": first.loads_as,
            "parameters": {name: model.num_parameters for name, model in models.items()},
            "vocab_size": first.config["vocab_size"],
            "tokenizer": done.model.tokenizer.manner,
            "step": done.model.step,
            "left_out": done.model.left_out,
            "remarks": done.model.remarks,
            "measurable": done.measurable,
            "bytes": done.num_bytes,
        }
        console.result(values, text=_text(done))


def _text(done: Imported) -> str:
    """Return the lines that the command prints: what was imported, and which commands accept it."""
    folder, place, imported = str(done.folder), shell_path(done.folder), done.model
    at = "" if imported.step is None else f" at step {imported.step:,}"
    lines = [f"{folder}: {imported.kind}{at}, {done.num_bytes / 1e6:,.1f} MB in all; {imported.tokenizer.manner}"]
    for name, model in imported.models.items():
        lines.append(
            f"  {name}: {model.num_parameters:,} parameters, {model.sizes.num_layers} layers of {model.sizes.hidden_size}"
        )
    if imported.left_out:
        shown = ", ".join(imported.left_out[:4]) + (
            f" and {len(imported.left_out) - 4} more" if len(imported.left_out) > 4 else ""
        )
        lines.append(f"  not imported: {shown}")
    if "discriminator" in imported.models:
        lines.append(f'  discern detect {place} --text "Some text."')
    if done.measurable:
        lines.append(f"  discern evaluate {place} --data DATA (made by: discern prepare TEXT --out DATA --tokenizer {place})")
    lines.append(f"  discern finetune {place} --task NAME --data DIR --out OUT")
    return "\n".join([*lines, "Fill in the license in README.md before you publish the model."])
