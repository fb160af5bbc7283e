"""`discern rerank`: re-rank n-best lists with the scores of a text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from discern.cli.console import Console, JsonOption, command
from discern.cli.options import DeviceOption, ScoringModelArgument
from discern.wording import counted

if TYPE_CHECKING:
    from discern.inference.corpus_metrics import Measured
    from discern.inference.rerank import Reranked


def rerank(
    model: ScoringModelArgument,
    lists: Annotated[
        Path,
        typer.Argument(metavar="NBEST", help="N-best lists: JSON lines, or the JSON of ESPnet, mlm-scoring or Vosk."),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write the ranked lists to, as JSON lines.")],
    dev: Annotated[
        Path | None,
        typer.Option(
            "--dev", metavar="FILE", help="Other N-best lists, with references, on which to tune lambda.", show_default=False
        ),
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(
            "--lambda",
            metavar="VALUE",
            help="Weight of the model's score; given instead of tuning it on --dev.",
            show_default=False,
        ),
    ] = None,
    max_weight: Annotated[
        float | None,
        typer.Option("--max-lambda", metavar="VALUE", help="Largest lambda to try on --dev (default: 1).", show_default=False),
    ] = None,
    length_weight: Annotated[
        float | None,
        typer.Option("--length-weight", metavar="VALUE", help="Weight added for each token of a text.", show_default=False),
    ] = None,
    tune_length: Annotated[bool, typer.Option("--tune-length", help="Also tune the length weight.")] = False,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric", metavar="NAME", help="Metric to optimize on --dev: wer, cer or bleu (default: wer).", show_default=False
        ),
    ] = None,
    scorer: Annotated[
        str | None,
        typer.Option("--scorer", metavar="NAME", help="Scorer, as in 'discern score' (default: pll, if the model supports it)."),
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Lower-case the texts before they go to the model.")] = False,
    device: DeviceOption = "auto",
    json_output: JsonOption = False,
) -> None:
    """Re-rank n-best lists by score + lambda x the model's score + length weight x tokens.

    With references, print error rates before and after.

    Example: discern rerank runs/electric test.jsonl --dev dev.jsonl --out reranked.jsonl
    """
    with command(json_output=json_output) as console:
        model = console.local_model(model)
        from discern.inference.rerank import rerank as run

        done = run(
            model,
            lists,
            console.progress,
            console.warn,
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
        if json_output:
            console.result(_values(done, dev) | {"out": out}, text="")
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
        **_metrics(done.metrics),
    }
    return values if dev is None else values | {"dev": {"file": dev, **_metrics(done.dev_metrics)}}


def _metrics(metrics: Mapping[str, Measured | None]) -> dict[str, object]:
    """Metrics as in `--json`; None if a metric was not measured."""
    found: dict[str, object] = {}
    for name, each in metrics.items():
        found |= {
            f"{name}_before": each and each.before,
            f"{name}_after": each and each.after,
            f"{name}_change_interval": each and each.interval and list(each.interval),
            f"{name}_better_fraction": each and each.better,
            f"{name}_best_possible": each and each.best_possible,
        }
    return found


def _show(console: Console, done: Reranked, out: Path) -> None:
    console.print(
        f"{out}: {counted(done.lists, 'list')} with {done.hypotheses:,} hypotheses in total, {done.changed:,} with a new best "
        f"hypothesis; scorer {done.scorer}, lambda {done.weights.model:g}, length weight {done.weights.length:g}"
    )
    table = Table("", "before", "after", "change", "95% interval", "best possible")
    parts = [("", done.metrics), *([("dev ", done.dev_metrics)] if done.dev_metrics else [])]
    for where, metrics in parts:
        for name, each in metrics.items():
            if each is None:
                continue
            least = "" if each.best_possible is None else f"{each.best_possible:.4f}"
            interval = "" if each.interval is None else "{:+.4f} to {:+.4f}".format(*each.interval)
            change = f"{each.after - each.before:+.4f}"
            table.add_row(f"{where}{name}", f"{each.before:.4f}", f"{each.after:.4f}", change, interval, least)
    if table.row_count:
        console.print(table)
    else:
        console.print("no list has a reference, so no metric was measured")
