"""`discern report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from discern.cli.console import JsonOption, command


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or not, or of a fine-tuning.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="File to write or replace; default: RUN/report.html.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show a run as one HTML page that needs no network.

    Of a pre-training: curves, held-out figures with their meaning, sizes, data and the whole configuration. Of a fine-tuning:
    scores of all seeds, published ones beside, and the worst mistakes.

    Example: discern report runs/first --out first.html
    """
    with command(json_output=json_output) as console:
        from discern.workflows.report import report as write_report
        from discern.workflows.report_finetuned import report_finetuned
        from discern.workflows.runs import is_finetuned

        target = report_finetuned(run, out) if is_finetuned(run) else write_report(run, out, warn=console.warn)
        size = target.stat().st_size
        console.result({"out": target, "bytes": size}, text=f"{target}: {size / 1000:,.0f} kB, opens in any browser")
