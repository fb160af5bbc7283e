"""Tables at every width: no number and no word is cut, whatever the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from discern.cli.console import _print
from discern.cli.evaluate import _groups
from discern.cli.progress import Terminal, fitting


def shown(table: Table, width: int) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    for part in fitting(table, width):
        console.print(part)
    return stream.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_number_of_an_evaluation_is_cut(width: int) -> None:
    names = ["tokens", "generator_accuracy", "sampled_accuracy", "discriminator_auc", "discriminator_precision"]
    names += ["discriminator_recall", "replaced_fraction", "discriminator_loss", "generator_loss"]
    rows = [{"group": f"{10**place:,} to {10 ** (place + 1):,}"} | dict.fromkeys(names, 0.12345) for place in range(4)]
    text = shown(_groups("occurrences per million tokens", rows), width)
    assert text.count("0.1235") == len(rows) * len(names)
    assert "…" not in text
    for word in ("occurrences", "accuracy", "precision", "replaced", "10,000"):
        assert word in text
    assert max(map(len, text.splitlines())) <= width


def test_the_name_of_a_row_stays_on_a_line() -> None:
    rows = [{"group": "second quarter"} | {f"figure_{number}": 0.5 for number in range(9)}]
    for part in shown(_groups("part of the row", rows), 60).split("part of")[1:]:
        assert "second quarter" in part


def test_a_table_that_fits_stays_whole() -> None:
    table = Table("name", "value")
    table.add_row("a", "1")
    assert len(fitting(table, 40)) == 1
    assert shown(table, 40).count("name") == 1


def test_text_on_a_terminal_breaks_between_words_and_commands_stay_on_a_line() -> None:
    stream = io.StringIO()
    console = Terminal(file=stream, force_terminal=True, width=40, color_system=None)
    words = "a warning of several long words that is longer than the terminal is wide"
    command = "  discern finetune " + "x" * 50
    _print(console, f"{words}\n{command}\n\nend")
    lines = stream.getvalue().splitlines()
    assert [word for line in lines[:2] for word in line.split()] == words.split()
    assert command in lines
    assert lines[-2:] == ["", "end"]
