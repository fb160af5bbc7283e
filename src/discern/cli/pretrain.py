"""`discern pretrain`: train an encoder on a prepared data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from discern.cli.console import JsonOption, command
from discern.cli.options import (
    FOREIGN,
    ConfigArgument,
    DataTemperatureOption,
    DeviceOption,
    NprocOption,
    PresetOption,
    ResumeOption,
    SetOption,
    launch_ranks,
)
from discern.cli.outputs import after_pretrain


def pretrain(
    config: ConfigArgument = None,
    *,
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            metavar="DATA[=WEIGHT]",
            help="Data set made by `discern prepare`. May be repeated, to mix data sets of one tokenizer; a weight is a share of "
            "the tokens to train on. Default: by the sizes of the data sets.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="Folder of the run. An interrupted run in it is continued.")],
    data_temperature: DataTemperatureOption = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            "--init-from",
            metavar="MODEL",
            help=f"Start from the weights of a run, an export, or {FOREIGN}; no preset is needed then.",
        ),
    ] = None,
    decay_from: Annotated[
        Path | None,
        typer.Option(
            "--decay-from",
            metavar="RUN",
            help="Continue a run with schedule 'wsd' or 'constant' in the new folder --out, and decay its learning rate to zero "
            "over optimizer.decay_steps steps. RUN means its newest checkpoint; RUN/checkpoints/step-... selects another "
            "one.",
        ),
    ] = None,
    resume: ResumeOption = "auto",
    device: DeviceOption = "auto",
    nproc: NprocOption = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the configuration and its estimated cost; train nothing.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Pre-train an encoder. You can interrupt it with Ctrl-C at any time; run the same command again to continue exactly where it
    stopped.

    Example: discern pretrain --preset electra-small --data DATA --out RUN --set train.max_hours=10

    Example: discern pretrain --preset electra-small --data DATA=0.7 --data GENERAL=0.3 --out RUN

    Example: discern pretrain --init-from MODEL --data DATA --out RUN --set train.max_steps=20000

    Example: discern pretrain --decay-from RUN --data DATA --out DECAYED --set optimizer.decay_steps=2000
    """
    with command(json_output=json_output, trains=True) as console:
        from discern.data.batching.mixture import parse_sources

        temperature = [] if data_temperature is None else [f"data.mixture_temperature={data_temperature}"]
        options: dict[str, Any] = {
            "data": parse_sources([*map(str, data)]),
            "out": out,
            "preset": preset,
            "overrides": (*temperature, *(set_ or ())),
            "resume": resume,
            "init_from": None if init_from is None else console.local_model(init_from),
            "decay_from": decay_from,
        }
        from discern.pretraining.run import plan
        from discern.pretraining.run import pretrain as run

        if dry_run:
            from discern.pretraining.estimate import estimate

            planned = plan(config=config, **options, warn=lambda _: None)
            estimated = estimate(planned, device=device, processes=nproc)
            console.result(estimated.values, text=estimated.text)
            return
        launch_ranks(nproc, lambda: plan(config=config, **options, warn=lambda _: None))
        record = run(config, **options, device=device, progress=console.progress)
        if record is not None:
            console.result(record, text=_text(record, out))


def _text(record: dict[str, Any], out: Path) -> str:
    """The last metrics, one per line, and what to do with the run."""
    losses = {f"heldout_loss of {name}": each["heldout_loss"] for name, each in record.get("heldout_by_source", {}).items()}
    metrics = [f"  {name:<26} {_number(value)}" for name, value in (record | losses).items() if not isinstance(value, dict)]
    return "\n".join([f"{out}:", *metrics, after_pretrain(out)])


def _number(value: object) -> str:
    """A number with four digits, or all digits before the decimal point if there are more."""
    if not isinstance(value, float):
        return f"{value:,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
