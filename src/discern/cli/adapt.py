"""`discern adapt`: continue the pre-training of a model on your own text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from discern.cli.console import JsonOption, command
from discern.cli.options import FOREIGN, DataTemperatureOption, DeviceOption, NprocOption, ResumeOption, SetOption, launch_ranks
from discern.cli.outputs import after_pretrain
from discern.training.rank_environment import rank_environment
from discern.wording import counted

if TYPE_CHECKING:
    from rich.table import Table

# Shown first, in this order; other metrics of the objective follow.
_FIRST = (
    "loss",
    "generator_loss",
    "discriminator_loss",
    "mlm_loss",
    "permutation_lm_loss",
    "perplexity",
    "discriminator_auc",
)


def adapt(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help=f"A run, an export, or {FOREIGN}.",
            show_default=False,
        ),
    ],
    *,
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            metavar="DATA[=WEIGHT]",
            help="Data set of your text, made by 'discern prepare TEXT --out DATA --tokenizer MODEL'. Without --replay, it "
            "may be repeated, as for 'discern pretrain'.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="OUT", help="Folder of the new run. An interrupted run in it is continued.")
    ],
    data_temperature: DataTemperatureOption = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay", metavar="DATA", help="Data set of general text, to mix into the training and to measure forgetting."
        ),
    ] = None,
    replay_share: Annotated[
        float | None,
        typer.Option(
            "--replay-share",
            help="Share of the general text in the tokens to train on; 0: only evaluate on it. [default: 0.2]",
            show_default=False,
        ),
    ] = None,
    add_tokens: Annotated[
        str | None,
        typer.Option(
            "--add-tokens",
            metavar="N|FILE",
            help="Add to the vocabulary the N words of your text that save the most tokens, or the words in FILE, one per line.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="CONFIG.toml", help="Settings that override those of the model.")
    ] = None,
    set_: SetOption = None,
    resume: ResumeOption = "auto",
    sequences: Annotated[int, typer.Option("--sequences", min=0, help="Number of held-out rows to evaluate on; 0: all.")] = 0,
    device: DeviceOption = "auto",
    nproc: NprocOption = 1,
    json_output: JsonOption = False,
) -> None:
    """Continue the pre-training of a model on your own text, and print the metrics before and after.

    Example: discern adapt google/electra-small-discriminator --data DATA --out OUT --set train.max_steps=2000

    Example: discern adapt RUN --data DATA --out OUT --replay GENERAL --replay-share 0.2 --add-tokens 500
    """
    with command(json_output=json_output, trains=True) as console:
        model = console.local_model(model)
        from discern.data.batching.mixture import parse_sources
        from discern.pretraining.adapt import adapt as run
        from discern.pretraining.adapt import data_with_tokens
        from discern.pretraining.warm_start import AddedTokens

        added = None if add_tokens is None else AddedTokens.of(add_tokens)
        temperature = [] if data_temperature is None else [f"data.mixture_temperature={data_temperature}"]
        options: dict[str, Any] = {
            "data": parse_sources([*map(str, data)]),
            "out": out,
            "config": config,
            "overrides": (*temperature, *(set_ or ())),
            "replay": replay,
            "replay_share": replay_share,
            "resume": resume,
        }
        if added is not None and nproc > 1 and rank_environment().world_size == 1:
            data_with_tokens(model, added=added, progress=console.progress, **options)  # one process makes the data set
        launch_ranks(nproc)
        found = run(model, **options, added=added, device=device, sequences=sequences, progress=console.progress)
        if found is not None:
            console.result(found, text=f"{out}: {found['start']}, trained for {counted(found['step'], 'more step')}")
            for name in found["before"]:
                console.print("")
                console.print(_table(name, found["before"][name], found["after"][name]))
            console.print(f"\n{after_pretrain(out)}")


def _table(name: str, before: dict[str, float], after: dict[str, float]) -> Table:
    """Held-out metrics on one text, before and after."""
    from rich.table import Table

    table = Table(f"{name} text, held out", "before", "after", "change")
    names = [*(each for each in _FIRST if each in before), *(each for each in before if each not in _FIRST)]
    for each in names:
        change = after[each] - before[each]
        table.add_row(
            each, _shown(before[each]), _shown(after[each]), f"{change:+,.4f}" if abs(change) < 100 else f"{change:+,.0f}"
        )
    return table


def _shown(value: Any) -> str:
    return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
