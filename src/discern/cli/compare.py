"""`discern compare`: objectives or configurations at equal cost, one table and one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from discern.cli.console import Console, JsonOption, command
from discern.cli.options import DeviceOption, PresetOption, SetOption
from discern.wording import counted


def compare(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="COMPARE.toml", help="Comparison file: the runs and the tasks to compare; see docs/howto/compare.md."
        ),
    ],
    *,
    data: Annotated[Path, typer.Option("--data", metavar="DATA", help="Data set for pre-training.")],
    out: Annotated[Path, typer.Option("--out", metavar="OUT", help="Output folder; interrupted work in it is continued.")],
    task_data: Annotated[
        Path | None,
        typer.Option("--task-data", metavar="DIR", help="Folder with one subfolder per task: RTE, CoLA, conll2000, ..."),
    ] = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    device: DeviceOption = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs with their steps and estimated hours; train nothing.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Pre-train several objectives or configurations at equal cost, fine-tune each, and compare the scores.

    The first run in the file sets the budget. You can interrupt the command with Ctrl-C at any time: run the same command again
    to continue; finished work is not repeated.

    Example: discern compare compare.toml --preset electra-small --data DATA --task-data tasks --out OUT
    """
    with command(json_output=json_output, trains=True) as console:
        from discern.compare import run

        options: dict[str, Any] = {
            "data": data,
            "out": out,
            "task_data": task_data,
            "preset": preset,
            "overrides": tuple(set_ or ()),
            "device": device,
        }
        if dry_run:
            from discern.compare.dry_run import dry_run as plan

            _show_plan(console, plan(config, **options))
            return
        found = run.compare(config, progress=console.progress, **options)
        page = out / run.PAGE_FILE
        console.result({**found, "page": page}, text=_scores(found))
        _show_rest(console, found, page)


def _show_plan(console: Console, found: dict[str, Any]) -> None:
    """One row per run with its cost, and the remaining work."""
    table = Table()
    for column in ("run", "objective", "seeds", "left", "steps", "FLOPs", "FLOPs, paper", "positions", "hours each"):
        table.add_column(column)
    for row in found["runs"]:
        hours = "-" if row["estimated_hours"] is None else f"{row['estimated_hours']:.2f}"
        cost = [_number(row[key]) for key in ("steps", "flops", "flops_paper_convention", "tokens")]
        table.add_row(row["name"], row["objective"], str(len(found["seeds"])), str(row["seeds_left"]), *cost, hours)
    console.result(found, text=table)
    for line in found["notes"]:
        console.print(line)
    console.print(
        f"still to do: about {found['estimated_hours_left']:.2f} hours of pre-training (an estimate) and "
        f"{counted(found['finetunings_left'], 'fine-tuning run')}; FLOPs are counted as {found['convention']}"
    )
    console.print("nothing was trained or written: this was a dry run")


def _scores(found: dict[str, Any]) -> Table:
    """One row per run with its cost and its scores."""
    from discern.report.comparison import score_columns, with_spread

    columns = score_columns(found)
    table = Table()
    for column in ("run", "steps", "FLOPs", "seconds", *columns):
        table.add_column(column)
    for row in found["runs"]:
        cost = [_number(row["steps"]), _number(row["flops"]), "-" if row["seconds"] is None else f"{row['seconds']:,.1f}"]
        table.add_row(row["name"], *cost, *(with_spread(row["scores"][column]) for column in columns))
    return table


def _show_rest(console: Console, found: dict[str, Any], page: Path) -> None:
    """Differences from the reference, their significance, and the path of the page."""
    from discern.report.comparison import p_text, significance_notes

    for entry in found["significance"]:
        difference = f"{entry['difference_of_medians']:+.4f}, p {p_text(entry)}; {entry['verdict']}"
        console.print(f"{entry['run']} against {entry['against']}, {entry['task']}: {difference}")
    for line in significance_notes(found):
        console.print(line)
    for row in found["runs"]:
        for seed, reason in row["failures"].items():
            folders = " and ".join(str(page.parent / part / row["name"] / f"seed-{seed}") for part in ("results", "work"))
            console.warn(f"{row['name']}, seed {seed} failed: {reason}; remove {folders} to try it again")
    console.print(f"{page} opens in any browser; comparison.json beside it has the same data")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value < 1e7 else f"{value:.3e}"
