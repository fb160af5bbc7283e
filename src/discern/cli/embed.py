"""`discern embed`: texts in, vectors out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from discern.cli.console import JsonOption, command
from discern.cli.options import DeviceOption
from discern.errors import ConfigError
from discern.wording import counted


def embed(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Output of 'discern finetune --task pairs', an export of it, or any run, export or Hugging Face model (folder "
            "or name on the Hub).",
        ),
    ],
    input: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="Plain text (one text per line), JSON lines, CSV, TSV or Parquet; - reads stdin (default).",
            show_default=False,
        ),
    ] = Path("-"),
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write vectors to FILE (.npy, .parquet or .jsonl), and a record of the model to FILE.json beside it, such as "
            "vectors.npy.json. Default: JSON lines on stdout.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="COLUMN", help="Column or field of the text (default: detected).", show_default=False),
    ] = None,
    pooling: Annotated[
        Literal["auto", "mean", "mean-all", "cls"],
        typer.Option(
            "--pooling",
            help="auto: as the model was trained, otherwise mean. mean: mean of the states of the text's tokens. mean-all: [CLS] "
            "and [SEP] included. cls: the state of [CLS].",
        ),
    ] = "auto",
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Scale vectors to length 1, or don't (default: as the model was trained).",
            show_default=False,
        ),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(
            "--dim",
            min=1,
            help="Keep only this many components of each vector, the first ones (task.matryoshka trains a model for this).",
            show_default=False,
        ),
    ] = None,
    search: Annotated[
        Path | None,
        typer.Option(
            "--search",
            metavar="VECTORS.npy",
            help="For each text, print the nearest of these vectors instead.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option("--top", min=1, help="Number of vectors that --search finds (default: 5).", show_default=False),
    ] = None,
    device: DeviceOption = "auto",
    json_output: JsonOption = False,
) -> None:
    """Turn texts into vectors, one per text, in order.

    Examples: discern embed MODEL texts.txt --out vectors.npy

    discern embed MODEL questions.txt --search vectors.npy --top 3
    """
    with command(json_output=json_output) as console:
        model = console.local_model(model)
        if str(input) == "-" and sys.stdin.isatty():
            raise ConfigError("there are no texts to embed", hint="give a file, or pipe in texts, one per line")
        from discern.inference.embed_file import embed as run

        gathered: list[dict[str, Any]] = []
        done = run(
            model,
            input,
            gathered.extend if json_output else console.records,
            console.progress,
            out=out,
            pooling=pooling,
            normalize=normalize,
            size=dim,
            column=text,
            search=search,
            top=top,
            device=device,
            warn=console.warn,
        )
        values: dict[str, Any] = {"rows": done.rows, "seconds": done.seconds, **done.record}
        if out is not None:
            rate = done.rows / max(done.seconds, 1e-9)
            vectors = f"{counted(done.rows, 'vector')} of {done.size} components"
            text_of = f"{out}: {vectors} in {done.seconds:.1f} s ({rate:,.0f} per second)"
            console.result(values | {"out": out}, text=text_of)
        elif json_output:
            console.result(values | {"results" if search is not None else "vectors": gathered}, text="")
