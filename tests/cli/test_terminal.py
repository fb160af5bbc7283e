"""Text of others reaches a terminal without anything that would steer it."""

from __future__ import annotations

import io
import json

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from discern.cli import console as console_module
from discern.cli.console import command, print_error
from discern.cli.progress import Display, Terminal, json_text, one_line, printable

HOSTILE = "a\x1b[31mb\x07\r\x9b2Jc\u202ed\u2066e\x7f"
SPELLED = r"a\x1b[31mb\x07\x0d\x9b2Jc\u202ed\u2066e\x7f"


def terminal(*, width: int = 80) -> Terminal:
    return Terminal(
        file=io.StringIO(), force_terminal=True, width=width, markup=False, highlight=False, emoji=False, color_system=None
    )


def shown(console: Terminal) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_control_characters_are_spelled_out_and_the_rest_stays() -> None:
    assert printable(HOSTILE) == SPELLED
    assert printable("tab\tand\nline, [red]markup[/red], Café, 日本語, 👩\u200d👩, می\u200cخواهم") == (
        "tab\tand\nline, [red]markup[/red], Café, 日本語, 👩\u200d👩, می\u200cخواهم"
    )
    assert printable(b"name-\xff.txt".decode("utf-8", "surrogateescape")) == r"name-\xff.txt"
    assert printable("half \ud83d") == r"half \ud83d"


def test_every_way_of_printing_is_covered() -> None:
    for renderable in (
        HOSTILE,
        Text(HOSTILE, style="bold"),
        Text("x ").append(HOSTILE, style="red"),
    ):
        console = terminal()
        console.print(renderable)
        assert r"\x1b[31m" in shown(console)
        assert not set(shown(console)) & set("\x1b\x07\r\x9b\u202e\u2066\x7f"), renderable


def test_cells_titles_and_columns_of_a_table_are_covered() -> None:
    table = Table(HOSTILE, HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE, Text(HOSTILE))
    console = terminal(width=200)
    console.print(table)
    assert shown(console).count(r"\x1b[31m") == 6
    assert not set(shown(console)) & set("\x1b\x07\r\x9b\u202e\u2066\x7f")


def test_a_progress_bar_is_covered() -> None:
    console = terminal(width=120)
    with Progress(TextColumn("{task.description}", markup=False), console=console, auto_refresh=False) as progress:
        progress.add_task(HOSTILE)
    assert r"\x1b[31m" in shown(console)
    assert "\x1b[31m" not in shown(console)
    assert "\u202e" not in shown(console)


def test_styles_stay_where_they_are() -> None:
    console = Terminal(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    console.print(Text("\x1b\x1b").append("red", style="red").append("plain"))
    assert shown(console) == "\\x1b\\x1b\x1b[31mred\x1b[0mplain\n"


def test_errors_warnings_and_notes_are_covered(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(f"no file {HOSTILE}", f"did you mean {HOSTILE}?")
    with command(json_output=False) as console:
        console.warn(HOSTILE)
        console.progress.note(HOSTILE)
        console.print(HOSTILE)
        console.lines([f"0.5\t{HOSTILE}"])
    console_of_lines = terminal()
    Display(console_of_lines).note(HOSTILE)
    said = capsys.readouterr()
    assert said.err.count(SPELLED) == 4
    assert shown(console_of_lines) == SPELLED + "\n"
    # What goes to another program keeps how its text is laid out.
    assert said.out == f"{SPELLED}\n0.5\t{one_line(HOSTILE)}\n"
    assert one_line(HOSTILE) == SPELLED.replace(r"\u202e", "\u202e").replace(r"\u2066", "\u2066")


def test_lines_on_a_terminal_are_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = terminal()
    monkeypatch.setattr(console_module, "_rich", lambda stderr: made)
    console_module.Console(json_output=False).lines([HOSTILE])
    assert shown(made) == SPELLED + "\n"


def test_json_is_the_same_value_without_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    value = {HOSTILE: [HOSTILE, "Café \u2028", b"\xff".decode("utf-8", "surrogateescape")]}
    with command(json_output=True) as console:
        console.result(value, text="")
    out = capsys.readouterr().out
    assert json.loads(out) == value
    assert "Café" in out
    assert not set(out) & set("\x1b\x07\r\x9b\u202e\u2066\x7f\u2028")
    assert out.isprintable() or out.removesuffix("\n").isprintable()
    assert json_text('"plain"') == '"plain"'


def test_records_are_json_whatever_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with command(json_output=True) as console:
        console.records([{"score": float("nan"), "text": HOSTILE}])
    assert json.loads(capsys.readouterr().out) == {"score": None, "text": HOSTILE}
