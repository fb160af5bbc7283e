"""`discern pretrain`: train an encoder on a prepared data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from discern.cli.console import JsonOption, command
from discern.cli.next_steps import after_pretrain
from discern.cli.options import ConfigArgument, PresetOption, SetOption, launch_ranks


def pretrain(
    config: ConfigArgument = None,
    *,
    data: Annotated[Path, typer.Option("--data", metavar="DATA", help="Data set, as `discern prepare` makes it.")],
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="Folder of the run; an interrupted run there is continued.")],
    preset: PresetOption = None,
    set_: SetOption = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            "--init-from",
            metavar="MODEL",
            help="Begin with the weights of a run, export or Hugging Face ELECTRA or BERT folder; no preset is needed then.",
        ),
    ] = None,
    resume: Annotated[
        Literal["auto", "never", "must"],
        typer.Option(
            "--resume", help="auto: go on where a run is; never: start over, the old run is moved aside; must: go on only."
        ),
    ] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes that share the work (torchrun does the same).")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run and what it costs; train nothing.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Pre-train an encoder. Interrupt it with Ctrl-C whenever you like: the same command goes on exactly where it stopped.

    Example: discern pretrain --preset electra-small --data DATA --out RUN --set train.max_hours=10

    Example: discern pretrain --init-from MODEL --data DATA --out RUN --set train.max_steps=20000
    """
    with command(json_output=json_output, trains=True) as console:
        if not dry_run:
            launch_ranks(nproc, console)
        from discern.workflows.pretrain import PretrainRequest
        from discern.workflows.pretrain import pretrain as run

        if init_from is not None:
            init_from = console.local_model(init_from)
        request = PretrainRequest(data, out, config, preset, tuple(set_ or ()), resume, device, init_from)
        if dry_run:
            from discern.workflows.plan import plan

            planned = plan(request)
            console.result(planned.values, text=planned.text)
            return
        record = run(request, console.progress)
        if record is not None:
            console.result(record, text=_text(record, out))


def _text(record: dict[str, object], out: Path) -> str:
    """The last figures, a line each, and what to do with the run."""
    figures = [
        f"  {name:<26} {value:.4g}" if isinstance(value, float) else f"  {name:<26} {value:,}" for name, value in record.items()
    ]
    return "\n".join([f"{out}:", *figures, after_pretrain(out)])
