"""`discern bench`: how fast a configuration trains on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from discern.cli.console import JsonOption, command
from discern.cli.options import ConfigArgument, PresetOption, SetOption, launch_ranks

if TYPE_CHECKING:
    from rich.table import Table


def bench(
    config: ConfigArgument = None,
    *,
    preset: PresetOption = None,
    set_: SetOption = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            min=16,
            help="Vocabulary size. Default: that of the preset; 30,522 for most, 8,192 for cpu-small.",
            show_default=False,
        ),
    ] = None,
    fill: Annotated[
        float, typer.Option("--fill", min=0.05, max=1.0, help="Share of real tokens; below 1 the rows are of uneven length.")
    ] = 1.0,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Steps to time; default: as many as fit into --seconds.", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="Time for each part, three steps at least.")] = 8.0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes that share the work, as in pretrain.")] = 1,
    json_output: JsonOption = False,
) -> None:
    """Measure tokens a second and memory of the training step and of the forward pass, on made-up text; writes nothing.

    Both are set against their matrix products alone, each at its best: what no implementation can beat. OMP_NUM_THREADS sets
    the threads.

    Example: discern bench --preset electra-small --set train.sequences_per_step=32 --set train.precision=float32
    """
    with command(json_output=json_output, trains=True) as console:
        launch_ranks(nproc, console)
        from discern.training.speed import Span
        from discern.workflows.bench import BenchRequest
        from discern.workflows.bench import bench as measure

        request = BenchRequest(config, preset, tuple(set_ or ()), device, vocab_size, fill, Span(steps, seconds))
        figures = measure(request, console.progress)
        if figures is not None:
            console.result(figures, text=_table(figures))
            console.print(_sentence(figures))


def _table(figures: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("", "training step", "forward only")
    gib = 2**30
    for name, form, key in (
        ("tokens a second", "{:,.0f}", "tokens_per_second"),
        ("limit of its matrix products", "{:,.0f}", "gemm_limit_tokens_per_second"),
        ("share of that limit", "{:.0%}", "gemm_share"),
    ):
        table.add_row(name, form.format(figures[key]), form.format(figures[f"{key}_forward"]))
    memory = [f"{figures[key] / gib:,.2f} GiB" for key in ("peak_memory_bytes", "peak_memory_bytes_forward")]
    table.add_row("peak memory", *memory)
    times = (figures[f"step_milliseconds{suffix}"] for suffix in ("", "_min", "_max"))
    table.add_row("milliseconds a step", "{:,.1f} ({:,.1f} to {:,.1f})".format(*times), "")
    table.add_row("model FLOPs utilisation", f"{figures['model_flops_utilisation']:.0%}", "")
    return table


def _sentence(figures: dict[str, Any]) -> str:
    """What was measured where, in words."""
    name = figures["preset"] or figures["objective"]
    rows, micro = figures["sequences_per_step"], figures["micro_batch_size"]
    parts = f", {micro} at once" if micro * figures["processes"] < rows else ""
    if figures["fill"] < 1:
        parts += f", {figures['fill']:.0%} of their places real"
    place = figures["device_name"]
    if figures["device"] == "cpu":
        without = "" if figures["kernels"] else ", without kernels"
        place = f"{figures['threads']} thread{'s' if figures['threads'] > 1 else ''} of {place}{without}"
    if figures["processes"] > 1:
        place += f" in each of {figures['processes']} processes"
    return (
        f"{name} ({figures['parameters']:,} parameters with a vocabulary of {figures['vocab_size']:,}) in {figures['precision']} "
        f"on {place}: "
        f"{rows} sequences of {figures['sequence_length']} a step{parts}, medians of {figures['steps']} steps."
    )
