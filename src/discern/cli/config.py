"""`discern config`: show, check and compare configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from discern.cli.console import JsonOption, command
from discern.cli.options import ConfigArgument, PresetOption, SetOption
from discern.config.layers import preset_names, preset_summary, usual_vocabulary
from discern.config.resolve import InvalidConfigError
from discern.config.schema import ABSENT, NONE, flatten, nest, toml_value
from discern.errors import ConfigError

if TYPE_CHECKING:
    from discern.config.resolve import Resolved

config = typer.Typer(help="Show, check and compare configurations.", rich_markup_mode=None)


@config.command()
def show(file: ConfigArgument = None, preset: PresetOption = None, set_: SetOption = None, json: JsonOption = False) -> None:
    """Print every value of a configuration and its origin. The output is itself a configuration file.

    Example: discern config show --preset electra-small --set objective.name=mlm
    """
    with command(json_output=json) as console:
        from discern.training.pretrain_config import load_pretrain_config

        resolved = load_pretrain_config(file, preset, set_ or ())
        values = {key: {"value": value, "origin": resolved.origins[key]} for key, value in flatten(resolved.config).items()}
        console.result({**nest(values), "dropped": resolved.dropped}, text=_tree(resolved))


@config.command()
def check(file: ConfigArgument = None, preset: PresetOption = None, set_: SetOption = None, json: JsonOption = False) -> None:
    """Check a configuration for `discern pretrain`, and report its problems.

    Example: discern config check my-run.toml
    """
    with command(json_output=json) as console:
        from discern.pretraining.bench import synthetic_vocabulary
        from discern.pretraining.run import meta_objective
        from discern.training.pretrain_config import load_pretrain_config

        try:
            resolved = load_pretrain_config(file, preset, set_ or ())
            meta_objective(resolved.config, synthetic_vocabulary(usual_vocabulary(preset)))
        except ConfigError as error:
            if json:
                console.result({"valid": False, "problems": _problems(error)}, text="")
            raise
        counted = ", ".join(f"{count} {origin}" for origin, count in Counter(resolved.origins.values()).most_common())
        for line in resolved.without_effect:
            console.warn(line)
        console.result({"valid": True, "problems": []}, text=f"valid: {len(resolved.origins)} values ({counted})")


@config.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="Preset, TOML file, or folder of a run.", show_default=False)],
    right: Annotated[
        str, typer.Argument(metavar="B", help="Preset, TOML file, or folder of a run to compare with.", show_default=False)
    ],
    json: JsonOption = False,
) -> None:
    """Print the values that differ between two configurations.

    Example: discern config diff electra-small electra-base
    """
    with command(json_output=json) as console:
        from discern.training.pretrain_config import differences

        found = differences(left, right)
        console.result({"left": left, "right": right, "differences": _sides(found)}, text=_beside(left, right, found))


@config.command()
def presets(json: JsonOption = False) -> None:
    """List the presets that come with discern.

    Example: discern config presets
    """
    with command(json_output=json) as console:
        summaries = {name: preset_summary(name) for name in preset_names()}
        console.result({"presets": summaries}, text=_list(summaries))


def _problems(error: ConfigError) -> list[dict[str, Any]]:
    """The problems of a configuration. A file that cannot be read is a problem without a key."""
    if isinstance(error, InvalidConfigError):
        return [vars(problem) for problem in error.problems]
    return [{"key": None, "text": error.message, "hint": error.hint}]


def _sides(found: list[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    """Differences for --json. A side that lacks the key is omitted."""
    return [
        {"key": key} | {side: value for side, value in (("left", a), ("right", b)) if value is not ABSENT} for key, a, b in found
    ]


def _list(summaries: Mapping[str, str]) -> Text:
    """Names and summaries, one per line."""
    width = max(map(len, summaries))
    lines = [Text.assemble((name.ljust(width), "bold"), "  ", summary) for name, summary in summaries.items()]
    return Text("\n").join(lines)


def _tree(resolved: Resolved[Any]) -> Text:
    """The configuration as TOML, with the origin of each value as a comment."""
    values = flatten(resolved.config)
    # In TOML, values without a section come first.
    written = {key: _assignment(key, values[key]) for key in sorted(values, key=lambda key: "." in key)}
    width = min(44, max(map(len, written.values())))
    text, section = Text(), ""
    for key, assignment in written.items():
        if section != (section := key.rpartition(".")[0]):
            text.append(f"{chr(10) if text else ''}[{section}]\n", style="bold")
        origin = resolved.origins[key]
        style = "green" if key in resolved.user_set else "dim" if origin == "default" else "cyan"
        text.append(assignment.ljust(width), style="dim" if assignment.startswith("#") else "")
        text.append(f"  # {origin}\n", style=style)
    for item in resolved.dropped:
        text.append(f"\n# dropped: {item.key} = {toml_value(item.value)}, from {item.origin}; {item.reason}", style="yellow")
    text.rstrip()
    return text


def _assignment(key: str, value: object) -> str:
    """One line of TOML; a comment if the value is None, which TOML cannot express."""
    name = key.rpartition(".")[2]
    return f"# {name} is {NONE}" if value is None else f"{name} = {toml_value(value)}"


def _beside(left: str, right: str, found: list[tuple[str, Any, Any]]) -> Table | str:
    """The differences as a table."""
    if not found:
        return f"{left} and {right} are the same"
    table = Table(box=SIMPLE_HEAD)
    for heading in ("key", left, right):
        table.add_column(heading)
    for key, first, second in found:
        table.add_row(*(Text(word) for word in (key, _word(first), _word(second))))
    return table


def _word(value: object) -> str:
    if value is ABSENT:
        return "-"
    return NONE if value is None else toml_value(value)
