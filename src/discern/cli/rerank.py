"""`discern rerank`: n-best lists ranked anew with what a text encoder makes of each hypothesis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from discern.cli.console import Console, JsonOption, command

if TYPE_CHECKING:
    from discern.scoring.rank_measures import Measured
    from discern.workflows.rerank import Reranked


def rerank(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A run, an export, or any Hugging Face ELECTRA, also by its name on the Hub.")
    ],
    lists: Annotated[
        Path,
        typer.Argument(metavar="NBEST", help="N-best lists: JSON lines, or the JSON of ESPnet, mlm-scoring or Vosk."),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the ranked lists there, as JSON lines.")],
    dev: Annotated[
        Path | None,
        typer.Option("--dev", metavar="FILE", help="Other lists, with references, to tune lambda on.", show_default=False),
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option("--lambda", metavar="VALUE", help="Weight of the model, instead of tuning.", show_default=False),
    ] = None,
    max_weight: Annotated[float, typer.Option("--max-lambda", metavar="VALUE", help="The largest lambda to try.")] = 1.0,
    length_weight: Annotated[
        float | None,
        typer.Option("--length-weight", metavar="VALUE", help="Added for each token of a text.", show_default=False),
    ] = None,
    tune_length: Annotated[bool, typer.Option("--tune-length", help="Tune that too.")] = False,
    metric: Annotated[str, typer.Option("--metric", help="Metric to optimize: wer, cer or bleu.")] = "wer",
    scorer: Annotated[
        str | None,
        typer.Option("--scorer", metavar="NAME", help="Scorer of 'discern score'. Default: pll, if the model supports it."),
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Give the model the texts in lower case.")] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    json_output: JsonOption = False,
) -> None:
    """Rank n-best lists anew: score + lambda x pseudo-log-likelihood. With references, tells the error rates before and after.

    Example: discern rerank runs/electric test.jsonl --dev dev.jsonl --out reranked.jsonl
    """
    with command(json_output=json_output) as console:
        model = console.local_model(model)
        from discern.workflows.rerank import RerankRequest
        from discern.workflows.rerank import rerank as run

        request = RerankRequest(
            model=model,
            input=lists,
            out=out,
            dev=dev,
            weight=weight,
            max_weight=max_weight,
            length_weight=length_weight,
            tune_length=tune_length,
            metric=metric,
            scorer=scorer,
            lowercase=lowercase,
            device=device,
        )
        done = run(request, console.progress, console.warn)
        if json_output:
            console.result(_values(done, request.dev) | {"out": out}, text="")
        else:
            _show(console, done, out)


def _values(done: Reranked, dev: Path | None) -> dict[str, object]:
    values: dict[str, object] = {
        "lists": done.lists,
        "hypotheses": done.hypotheses,
        "references": done.references,
        "changed": done.changed,
        "scorer": done.scorer,
        "lambda": done.weights.model,
        "length_weight": done.weights.length,
        **_figures(done.measured),
    }
    return values if dev is None else values | {"dev": {"file": dev, **_figures(done.dev)}}


def _figures(measured: Mapping[str, Measured | None]) -> dict[str, object]:
    """By metric and what of it; None where it was not measured."""
    found: dict[str, object] = {}
    for name, figures in measured.items():
        found |= {
            f"{name}_before": figures and figures.before,
            f"{name}_after": figures and figures.after,
            f"{name}_change_interval": figures and [figures.low, figures.high],
            f"{name}_better_fraction": figures and figures.better,
            f"{name}_best_possible": figures and figures.best_possible,
        }
    return found


def _show(console: Console, done: Reranked, out: Path) -> None:
    console.print(
        f"{out}: {done.lists:,} lists of {done.hypotheses:,} hypotheses, {done.changed:,} with another winner; scorer "
        f"{done.scorer}, lambda {done.weights.model:g}, length weight {done.weights.length:g}"
    )
    table = Table("", "before", "after", "change", "95 % interval", "best possible")
    parts = [("", done.measured), *([("dev ", done.dev)] if done.dev else [])]
    for where, measured in parts:
        for name, figures in measured.items():
            if figures is None:
                continue
            least = "" if figures.best_possible is None else f"{figures.best_possible:.4f}"
            interval = f"{figures.low:+.4f} to {figures.high:+.4f}"
            change = f"{figures.after - figures.before:+.4f}"
            table.add_row(f"{where}{name}", f"{figures.before:.4f}", f"{figures.after:.4f}", change, interval, least)
    if table.row_count:
        console.print(table)
    else:
        console.print("no list has a reference, so nothing was measured")
