"""`discern report`: an HTML page of a run or a fine-tuned model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from discern.cli.console import JsonOption, command


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, finished or not, or a fine-tuned model.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="File to write or replace (default: RUN/report.html).")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Write a self-contained HTML page about a run or a fine-tuned model.

    For a run: curves, held-out metrics with their meaning, sizes, data and the full configuration. For a fine-tuned model:
    scores of all seeds, baselines, and the worst mistakes.

    Example: discern report runs/first --out first.html
    """
    with command(json_output=json_output) as console:
        from discern.model_files.finetuned import is_finetuned
        from discern.report.finetuned_page import report_finetuned
        from discern.report.run_page import report as write_report

        target = report_finetuned(run, out) if is_finetuned(run) else write_report(run, out, warn=console.warn)
        size = target.stat().st_size
        console.result({"out": target, "bytes": size}, text=f"{target}: {size / 1000:,.0f} kB, opens in any browser")
