"""`discern import`: somebody else's model as a folder that every verb takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from discern.cli.console import JsonOption, command

if TYPE_CHECKING:
    from discern.workflows.import_model import Imported


def import_(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="A Hugging Face folder of an ELECTRA, a BERT or an XLNet, or two: the discriminator and the generator of one "
            "model. Or a checkpoint of the released TensorFlow code: model.ckpt-N.index, or the folder that it is in.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder, or an earlier import, which is replaced.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json, a vocab.txt or a folder; by default the source's."),
    ] = None,
    lowercase: Annotated[
        bool | None,
        typer.Option(
            "--lowercase/--cased",
            help="Whether texts are lower-cased. Default: as the files say; for a bare vocab.txt, as its entries tell.",
        ),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option("--heads", min=1, help="Attention heads of a TensorFlow model. [default: one for 64 of its width]"),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Bring in somebody else's model, with its tokenizer, as a folder that every verb takes. TensorFlow is not needed.

    Examples: discern import electra-small/model.ckpt-1000000.index --out models/korean

    discern import hub/discriminator hub/generator --out models/both
    """
    with command(json_output=json_output) as console:
        from discern.workflows.import_model import ImportRequest, import_model

        done = import_model(ImportRequest(sources, out, tokenizer, lowercase, heads), console.progress, console.warn)
        models = done.adopted.models
        first = next(iter(models.values()))
        values = {
            "out": done.folder,
            "kind": done.adopted.kind,
            "networks": list(models),
            "architecture": first.config["architectures"][0],
            "parameters": {name: model.num_parameters for name, model in models.items()},
            "vocab_size": first.config["vocab_size"],
            "tokenizer": done.tokenizer,
            "step": done.adopted.step,
            "left_out": done.adopted.left_out,
            "remarks": done.adopted.remarks,
            "measurable": done.measurable,
            "bytes": done.num_bytes,
        }
        console.result(values, text=_text(done))


def _text(done: Imported) -> str:
    """What came, and what can be done with it now."""
    folder, adopted = str(done.folder), done.adopted
    at = "" if adopted.step is None else f" at step {adopted.step:,}"
    lines = [f"{folder}: {adopted.kind}{at}, {done.num_bytes / 1e6:,.1f} MB in all; {done.tokenizer}"]
    for name, model in adopted.models.items():
        sizes = adopted.sizes[name]
        lines.append(f"  {name}: {model.num_parameters:,} parameters, {sizes.num_layers} layers of {sizes.hidden_size}")
    if adopted.left_out:
        shown = ", ".join(adopted.left_out[:4]) + (f" and {len(adopted.left_out) - 4} more" if len(adopted.left_out) > 4 else "")
        lines.append(f"  left behind: {shown}")
    if "discriminator" in adopted.models:
        lines.append(f'  discern detect {folder} --text "Some text."')
    if done.measurable:
        lines.append(f"  discern evaluate {folder} --data DATA (made by: discern prepare TEXT --out DATA --tokenizer {folder})")
    lines.append(f"  discern finetune {folder} --task NAME --data DIR --out OUT")
    return "\n".join([*lines, "Fill in the license in README.md before you publish it."])
