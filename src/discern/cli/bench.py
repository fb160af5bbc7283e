"""`discern bench`: training speed of a configuration on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from discern.cli.console import JsonOption, command
from discern.cli.options import ConfigArgument, NprocOption, PresetOption, SetOption, launch_ranks

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
            help="Vocabulary size (default: that of the preset, 30,522 for most and 8,192 for modern-cpu).",
            show_default=False,
        ),
    ] = None,
    fill: Annotated[
        float,
        typer.Option(
            "--fill",
            min=0.05,
            max=1.0,
            help="Fraction of positions that hold real tokens rather than padding. Below 1, the rows have different lengths.",
        ),
    ] = 1.0,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, help="Number of steps to time (default: as many as fit in --seconds).", show_default=False
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="Seconds to spend on each part; at least three steps are timed.")
    ] = 8.0,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            help="Device to use: auto, cpu, cuda, cuda:1, ...; meta: run nothing, and compute FLOPs "
            "and memory from the shapes alone.",
        ),
    ] = "auto",
    nproc: NprocOption = 1,
    json_output: JsonOption = False,
) -> None:
    """Measure speed and memory of training steps and of forward passes, on made-up text. Nothing is written.

    Both are compared with the time of their matrix products alone, which no implementation can beat. OMP_NUM_THREADS sets the
    number of threads. With --device meta, nothing runs: the FLOPs and the peak memory of a training step on a GPU follow from the
    shapes of its tensors, for any configuration.

    Example: discern bench --preset electra-small --set train.sequences_per_step=32 --set train.precision=float32
    """
    with command(json_output=json_output, trains=True) as console:
        from discern.pretraining.bench import bench as measure
        from discern.training.pretrain_config import load_pretrain_config

        launch_ranks(nproc, lambda: load_pretrain_config(config, preset, tuple(set_ or ())))

        measured = measure(
            config,
            preset=preset,
            overrides=tuple(set_ or ()),
            device=device,
            vocab_size=vocab_size,
            fill=fill,
            steps=steps,
            seconds=seconds,
            progress=console.progress,
        )
        if measured is not None and "flops_per_step" in measured:
            console.result(measured, text=_counted(measured))
        elif measured is not None:
            console.result(measured, text=_table(measured))
            console.print(_sentence(measured))


def _counted(figures: dict[str, Any]) -> str:
    """What a step on the meta device tells, in two sentences."""
    name, rows = figures["preset"] or figures["objective"], figures["sequences_per_step"]
    parts = f", {figures['micro_batch_size']} per forward pass" if figures["micro_batch_size"] < rows else ""
    return (
        f"{name} ({figures['parameters']:,} parameters with a vocabulary of {figures['vocab_size']:,}) in {figures['precision']}:"
        f" {rows} sequences of {figures['sequence_length']} per step{parts}.\n"
        f"A training step on one GPU takes {figures['flops_per_step']:.4g} FLOPs in its matrix products and holds at most "
        f"{figures['peak_memory_bytes'] / 2**30:,.2f} GiB of tensors. Nothing was computed."
    )


def _table(figures: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("", "training step", "forward only")
    gib = 2**30
    for name, form, key in (
        ("tokens per second", "{:,.0f}", "tokens_per_second"),
        ("limit of its matrix products", "{:,.0f}", "gemm_limit_tokens_per_second"),
        ("share of that limit", "{:.0%}", "gemm_share"),
    ):
        table.add_row(name, form.format(figures[key]), form.format(figures[f"{key}_forward"]))
    memory = [f"{figures[key] / gib:,.2f} GiB" for key in ("peak_memory_bytes", "peak_memory_bytes_forward")]
    table.add_row("peak memory", *memory)
    times = (figures[f"step_milliseconds{suffix}"] for suffix in ("", "_min", "_max"))
    table.add_row("milliseconds per step", "{:,.1f} ({:,.1f} to {:,.1f})".format(*times), "")
    table.add_row("model FLOPs utilization", f"{figures['model_flops_utilization']:.0%}", "")
    return table


def _sentence(figures: dict[str, Any]) -> str:
    """One sentence about the configuration and the machine."""
    name = figures["preset"] or figures["objective"]
    rows, micro = figures["sequences_per_step"], figures["micro_batch_size"]
    parts = f", {micro} per forward pass" if micro * figures["processes"] < rows else ""
    if figures["fill"] < 1:
        parts += f", {figures['fill']:.0%} of their positions real"
    place = figures["device_name"]
    if figures["device"] == "cpu":
        without = "" if figures["kernels"] else ", without kernels"
        place = f"{figures['threads']} thread{'s' if figures['threads'] > 1 else ''} of {place}{without}"
    if figures["processes"] > 1:
        place += f" in each of {figures['processes']} processes"
    return (
        f"{name} ({figures['parameters']:,} parameters with a vocabulary of {figures['vocab_size']:,}) in {figures['precision']} "
        f"on {place}: "
        f"{rows} sequences of {figures['sequence_length']} per step{parts}, medians of {figures['steps']} steps."
    )
