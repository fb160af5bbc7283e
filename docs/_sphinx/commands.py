"""The reference of the commands: a page for each, from the same declarations as its `--help`."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import typer
from docs._sphinx.pages import block, code, prose, table

from discern.cli.main import application

_EXAMPLE = re.compile(r"Examples?: ")


@dataclass(frozen=True)
class Verb:
    """One command.

    Attributes:
        name: as typed after `discern`: "config show".
        declared: the parsed declaration.
        description: paragraphs of its help.
        examples: command lines.
    """

    name: str
    declared: Any
    description: list[str]
    examples: list[str]


def verbs() -> list[Verb]:
    """All commands, those of a group after one another, in the order of `discern --help`."""
    group: Any = typer.main.get_command(application())
    found = []
    for name, declared in group.commands.items():
        inside = getattr(declared, "commands", None)
        found += [_verb(f"{name} {each}", inside[each]) for each in inside] if inside else [_verb(name, declared)]
    return found


def _verb(name: str, declared: Any) -> Verb:
    paragraphs = [" ".join(each.split()) for each in inspect.cleandoc(declared.help or "").split("\n\n")]
    at = next((index for index, each in enumerate(paragraphs) if _EXAMPLE.match(each)), len(paragraphs))
    return Verb(name, declared, paragraphs[:at], [_EXAMPLE.sub("", each) for each in paragraphs[at:]])


def parts() -> dict[str, str]:
    """The list of commands, with a hidden table of contents."""
    each = verbs()
    rows = [(f"[`discern {verb.name}`](commands/{_page(verb)})", prose(verb.description[0])) for verb in each]
    contents = "\n".join(f"commands/{_page(verb).removesuffix('.md')}" for verb in each)
    return {"commands": table(["command", "what it does"], rows) + f"\n```{{toctree}}\n:hidden:\n\n{contents}\n```\n"}


def pages() -> dict[str, str]:
    """A page for each command, by its path."""
    return {f"commands/{_page(verb)}": _text(verb) for verb in verbs()}


def _page(verb: Verb) -> str:
    return f"{verb.name.replace(' ', '-')}.md"


def _text(verb: Verb) -> str:
    context = verb.declared.make_context(f"discern {verb.name}", [], resilient_parsing=True)
    usage = _plain(" ".join(verb.declared.get_usage(context).split()).removeprefix("Usage: "))
    parameters = [each for each in verb.declared.params if not getattr(each, "hidden", False)]
    arguments = [each for each in parameters if not each.opts[0].startswith("-")]
    options = [each for each in parameters if each.opts[0].startswith("-")]
    said = [f"# discern {verb.name}\n", *(f"{prose(paragraph)}\n" for paragraph in verb.description), block(usage)]
    if arguments:
        rows = [(code(_metavar(each, context)), prose(each.help or "")) for each in arguments]
        said += ["## Arguments\n", table(["argument", "meaning"], rows)]
    rows = [(_names(each, context), prose(each.help or ""), _default(each)) for each in options]
    rows.append(("`--help`", "Show this message and exit.", ""))
    said += ["## Options\n", table(["option", "meaning", "default"], rows)]
    if verb.examples:
        heading = "## Example\n" if len(verb.examples) == 1 else "## Examples\n"
        said += [heading, block("\n".join(verb.examples), "console")]
    return "\n".join(said)


def _plain(usage: str) -> str:
    """A usage with one pair of brackets and one ellipsis: `{SOURCE...}...` is `SOURCE...`."""
    usage = re.sub(r"\{([^{}]+)\}", r"\1", usage).replace("[[", "[").replace("]]", "]")
    return re.sub(r"(\.\.\.|\])\.\.\.", r"\1", usage)


def _metavar(parameter: Any, context: Any) -> str:
    return str(parameter.metavar or parameter.make_metavar(context))


def _names(parameter: Any, context: Any) -> str:
    """The names of an option, with its value: `--out DIR`."""
    record = parameter.get_help_record(context)
    named = record[0] if record else ", ".join(parameter.opts)
    named = named.replace("<float range>", "NUMBER").replace("<int range>", "N")
    return ", ".join(code(" ".join(each.split())) for each in re.split(r", (?=-)", named))


def _default(parameter: Any) -> str:
    value = parameter.default
    shown = not callable(value) and value not in (None, False, ()) and getattr(parameter, "show_default", True)
    return code("yes" if value is True else str(value)) if shown else ""
