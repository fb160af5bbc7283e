"""`discern compare`: objectives or configurations at equal cost, one table and one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from discern.cli.console import Console, JsonOption, command
from discern.cli.options import PresetOption, SetOption

if TYPE_CHECKING:
    from discern.workflows.compare_plan import CompareRequest


def compare(
    config: Annotated[Path, typer.Argument(metavar="COMPARE.toml", help="What is compared: see docs/howto/compare.md.")],
    *,
    data: Annotated[Path, typer.Option("--data", metavar="DATA", help="Data set that all are pre-trained on.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="OUT", help="Folder of the results; interrupted work there is continued.")
    ],
    task_data: Annotated[
        Path | None,
        typer.Option("--task-data", metavar="DIR", help="Folder that holds a folder for each task: RTE, CoLA, conll2000, ..."),
    ] = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run, how many steps and hours; train nothing.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Pre-train several objectives or configurations at equal cost, fine-tune each, and put the scores side by side.

    The first run of the file sets the budget. Interrupt it with Ctrl-C whenever you like: the same command continues, and
    repeats nothing that is finished.

    Example: discern compare compare.toml --preset electra-small --data DATA --task-data glue --out OUT
    """
    with command(json_output=json_output, trains=True) as console:
        from discern.workflows.compare_plan import CompareRequest

        request = CompareRequest(config, data, out, task_data, preset, tuple(set_ or ()), device)
        if dry_run:
            _show_plan(console, request)
            return
        from discern.workflows.compare import PAGE_FILE
        from discern.workflows.compare import compare as run

        found = run(request, console.progress)
        page = out / PAGE_FILE
        console.result({**found, "page": page}, text=_scores(found))
        _show_rest(console, found, page)


def _show_plan(console: Console, request: CompareRequest) -> None:
    from discern.workflows.compare_dry_run import dry_run

    found = dry_run(request)
    table = Table()
    for column in ("run", "objective", "seeds", "left", "steps", "FLOPs", "FLOPs, paper", "positions", "hours each"):
        table.add_column(column)
    for row in found["runs"]:
        hours = "-" if row["estimated_hours"] is None else f"{row['estimated_hours']:.2f}"
        cost = [_figure(row[key]) for key in ("steps", "flops", "flops_paper_convention", "tokens")]
        table.add_row(row["name"], row["objective"], str(len(found["seeds"])), str(row["seeds_left"]), *cost, hours)
    console.result(found, text=table)
    for line in found["notes"]:
        console.print(line)
    console.print(
        f"about {found['estimated_hours_left']:.2f} hours of pre-training are left (estimate), and {found['finetunings_left']} "
        f"fine-tunings besides; FLOPs are {found['convention']}"
    )
    console.print("nothing was trained or written: this was a dry run")


def _scores(found: dict[str, Any]) -> Table:
    """A row for each run: what it cost and what it scored."""
    from discern.report.comparison import score_columns, with_spread

    columns = score_columns(found)
    table = Table()
    for column in ("run", "steps", "FLOPs", "seconds", *columns):
        table.add_column(column)
    for row in found["runs"]:
        cost = [_figure(row["steps"]), _figure(row["flops"]), "-" if row["seconds"] is None else f"{row['seconds']:,.1f}"]
        table.add_row(row["name"], *cost, *(with_spread(row["scores"][column]) for column in columns))
    return table


def _show_rest(console: Console, found: dict[str, Any], page: Path) -> None:
    """Differences from the reference, what they mean, and where the page is."""
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
    console.print(f"{page}: opens in any browser; the same in comparison.json beside it")


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value < 1e7 else f"{value:.3e}"
