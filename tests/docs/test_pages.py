"""Every page: its links lead somewhere, and its commands have arguments, options and settings that exist."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from docs._sphinx.reference import sections, verbs

from discern.cli.main import application
from discern.config.resolve import preset_names
from tests.docs.pages import PAGES, ROOT, anchors, commands, links


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_and_their_anchors_exist(page: Path) -> None:
    for target in links(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        # The front page of the site is laid out in the root.
        folder = ROOT if "_sphinx" in page.parts else page.parent
        file = (folder / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target


def test_a_dead_link_is_found() -> None:
    assert links("[a](b.md#c) `[not](one)`\n```\n[nor](this)\n```\n[site](https://example.org)") == ["b.md#c"]
    assert anchors("# A `b`, c\n```\n# no\n```\n## A `b`, c\n") == {"a-b-c", "a-b-c-1"}


@cache
def _group() -> Any:
    return typer.main.get_command(application())


def _parse(arguments: list[str]) -> None:
    """Parse a command line as `discern` does, without running it; raises what it would print."""
    if arguments and arguments[0] in ("--help", "--version"):
        return
    command, rest = _group().commands[arguments[0]], arguments[1:]
    if hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    if "--help" not in rest:
        command.make_context(arguments[0], list(rest))  # it consumes its list
    for option, value in pairwise(rest):
        if option == "--set":
            _check_setting(value)
        assert option != "--preset" or value in preset_names(), value


def _check_setting(value: str) -> None:
    key, equals, _ = value.partition("=")
    section, _, name = key.partition(".")
    assert equals, value
    # A comparison has fine-tuning settings of its own.
    parts = [section, *(["compare"] if section == "finetune" else [])]
    names = {
        name for part in parts if part != "tasks" for kind in sections()[part].variants.values() for name in kind.model_fields
    }
    assert section == "tasks" or name in names, f"no setting '{key}'"


@pytest.mark.parametrize("page", [page for page in PAGES if "records" not in page.parts], ids=_name)
def test_commands_are_understood(page: Path) -> None:
    for arguments in commands(page.read_text(encoding="utf-8")):
        _parse(arguments)


def test_a_command_that_does_not_exist_is_found() -> None:
    shown = "```\ncat x | discern detect RUN --out y > z\n```\n"
    shown += "```sh\ndiscern pretrain --data D --out R \\\n    --set train.seed=1\n```\n"
    assert list(commands(shown)) == [
        ["detect", "RUN", "--out", "y"],
        ["pretrain", "--data", "D", "--out", "R", "--set", "train.seed=1"],
    ]
    with pytest.raises(KeyError):
        _parse(["pre-train", "--data", "D"])
    with pytest.raises(Exception, match="No such option"):
        _parse(["pretrain", "--dta", "D"])
    with pytest.raises(AssertionError, match=r"train\.max_step'"):
        _parse(["pretrain", "--data", "D", "--out", "R", "--set", "train.max_step=1"])


@pytest.mark.parametrize("verb", verbs(), ids=lambda verb: verb.name)
def test_every_command_has_an_example_that_is_understood(verb: Any) -> None:
    assert verb.examples
    shown = list(commands("```\n" + "\n".join(verb.examples) + "\n```\n"))
    assert len(shown) == len(verb.examples)
    for arguments in shown:
        assert arguments[: len(verb.name.split())] == verb.name.split()
        _parse(arguments)
