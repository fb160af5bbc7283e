"""`discern adapt`: continue a model on one's own text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from discern.cli.console import JsonOption, command
from discern.cli.next_steps import after_pretrain
from discern.cli.options import SetOption, launch_ranks
from discern.errors import ConfigError
from discern.training.place import place

if TYPE_CHECKING:
    from rich.table import Table

# Shown first, in this order; what an objective has beyond them follows.
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
            metavar="MODEL", help="A run, an export, or a Hugging Face ELECTRA, BERT or XLNet folder.", show_default=False
        ),
    ],
    *,
    data: Annotated[
        Path, typer.Option("--data", metavar="DATA", help="Your text: discern prepare TEXT --out DATA --tokenizer MODEL")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="OUT", help="Folder of the new run; an interrupted one there is continued.")
    ],
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="DATA", help="General text, to mix in and to measure what is forgotten."),
    ] = None,
    replay_share: Annotated[
        float | None,
        typer.Option(
            "--replay-share",
            help="Share of the examples that are of the general text; 0: only measure on it. [default: 0.2]",
            show_default=False,
        ),
    ] = None,
    add_tokens: Annotated[
        str | None,
        typer.Option(
            "--add-tokens",
            metavar="N|FILE",
            help="Extend the vocabulary by the N words of your text that are split most, or by those of a file, one a line.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="CONFIG.toml", help="Settings, over those of the model.")
    ] = None,
    set_: SetOption = None,
    resume: Annotated[
        Literal["auto", "never", "must"],
        typer.Option(
            "--resume", help="auto: go on where a run is; never: start over, the old run is moved aside; must: go on only."
        ),
    ] = "auto",
    sequences: Annotated[int, typer.Option("--sequences", min=0, help="Held-out rows to measure on; 0: all.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes that share the work (torchrun does the same).")] = 1,
    json_output: JsonOption = False,
) -> None:
    """Continue a model on your own text, with an optimizer and a schedule of its own, and print what that gained.

    Example: discern adapt google/electra-small-discriminator/ --data DATA --out OUT --set train.max_steps=2000

    Example: discern adapt RUN --data DATA --out OUT --replay GENERAL --replay-share 0.2 --add-tokens 500
    """
    with command(json_output=json_output, trains=True) as console:
        model = console.local_model(model)
        from discern.workflows.adapt import AdaptRequest, data_of
        from discern.workflows.adapt import adapt as run
        from discern.workflows.adapt_vocabulary import AddedTokens
        from discern.workflows.request import Replay

        added = None if add_tokens is None else AddedTokens.of(add_tokens)
        if replay_share is not None and replay is None:
            raise ConfigError(f"--replay-share {replay_share:g} says nothing of which text", hint="add --replay DATA")
        mixed = None if replay is None else Replay(replay, 0.2 if replay_share is None else replay_share)
        request = AdaptRequest(model, data, out, config, tuple(set_ or ()), mixed, added, resume, device, sequences)
        if nproc > 1 and place().world == 1:
            data_of(request, console.progress)
        launch_ranks(nproc, console)
        found = run(request, console.progress)
        if found is not None:
            console.result(found, text=f"{out}: {found['start']}, {found['step']:,} steps later")
            for name in found["before"]:
                console.print("")
                console.print(_table(name, found["before"][name], found["after"][name]))
            console.print(f"\n{after_pretrain(out)}")


def _table(name: str, before: dict[str, float], after: dict[str, float]) -> Table:
    """The held-out figures on one text, and how they changed."""
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
