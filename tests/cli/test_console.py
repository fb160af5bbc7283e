"""The streams, exit codes and signals of a command, and what it prints of untrusted text."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy
import pytest
import torch
import typer
from rich.text import Text

from discern.cli.console import _print, columns, command, jsonable, print_error
from discern.cli.progress import Display, Terminal, printable
from discern.errors import CheckpointError, ConfigError, DataError, RanksError

HOSTILE = "a\x1b[31mb\x07\r\x9b2Jc\u202ed\u2066e\x7f"
ESCAPED = r"a\x1b[31mb\x07\x0d\x9b2Jc\u202ed\u2066e\x7f"
Capture = pytest.CaptureFixture[str]


def program(body: str) -> list[str]:
    """The command line of a process that runs this body as a verb."""
    lines = ["import os, signal, sys, time", "from discern.cli.console import command", "with command(json_output=False) as c:"]
    return [sys.executable, "-c", "\n".join([*lines, *(f"    {line}" for line in body.splitlines())])]


def run(body: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(program(body), capture_output=True, text=True, check=False, **options)


def exit_code(error: BaseException) -> object:
    """The exit code of a verb that raises `error`."""
    with pytest.raises(SystemExit) as caught, command(json_output=False):
        raise error
    return caught.value.code


def terminal(monkeypatch: pytest.MonkeyPatch, width: int = 80) -> io.StringIO:
    """Make stdout a terminal."""
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    return stream


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("asked wrongly"), 2),
        (CheckpointError("damaged"), 1),
        (ValueError("a bug"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit(None), 0),
        (typer.Exit(3), 3),
    ],
)
def test_errors_become_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(("already_said", "lines"), [((), 1), (("stopped and saved",), 0)])
def test_ctrl_c_is_no_error_and_is_explained_once(already_said: tuple[str, ...], lines: int, capsys: Capture) -> None:
    assert exit_code(KeyboardInterrupt(*already_said)) == 130
    shown = capsys.readouterr().err
    assert (shown.count("run the same command"), len(shown.splitlines())) == (lines, lines)
    assert "error" not in shown


def test_an_error_is_its_message_and_its_hint_on_stderr(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    exit_code(DataError("x" * 300 + " [MASK] [bold]", hint="type this"))
    assert capsys.readouterr() == ("", f"error: {'x' * 300} [MASK] [bold]\n  hint: type this\n")


def test_an_unexpected_error_is_one_line_and_a_way_to_its_traceback(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    exit_code(ValueError("two\nlines"))
    shown = capsys.readouterr().err
    assert shown.splitlines()[0] == "error: ValueError: two lines"
    assert "DISCERN_DEBUG=1" in shown
    assert "Traceback" not in shown
    monkeypatch.setenv("DISCERN_DEBUG", "1")
    exit_code(DataError("deep"))
    assert "Traceback" in capsys.readouterr().err


def test_json_is_one_object_and_nothing_else_on_stdout(capsys: Capture) -> None:
    value = {HOSTILE: [HOSTILE, "Café \u2028", b"\xff".decode("utf-8", "surrogateescape")], "loss": None}
    with command(json_output=True) as console:
        console.print("for people")
        console.lines(["for programs"])
        console.warn("careful")
        console.progress.start("working", 2, "steps")
        console.progress.advance(2, loss="1.0")
        console.result(value | {"loss": float("nan")}, text="for people")
    out, err = capsys.readouterr()
    assert json.loads(out) == value
    assert "Café" in out
    assert out.removesuffix("\n").isprintable()
    assert "warning: careful" in err


@dataclass(frozen=True)
class Point:
    x: float


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (numpy.float32("nan"), None),
        (numpy.int64(3), 3),
        (numpy.array([1.0, float("inf")]), [1.0, None]),
        (torch.tensor([1, 2]), [1, 2]),
        (Path("a/b"), "a/b"),
        (Point(1.0), {"x": 1.0}),
        (float, "<class 'float'>"),
    ],
)
def test_values_become_json(value: object, expected: object) -> None:
    found = jsonable({"value": value})["value"]
    assert found == expected
    assert type(found) is type(expected)


def test_text_is_not_wrapped_or_marked_up_away_from_a_terminal(capsys: Capture) -> None:
    text = f"[bold]{'path/' * 60}[/bold] :smile: 1234 'x'"
    with command(json_output=False) as console:
        console.print(text)
        console.print(columns(("name", "value"), [("a" * 90, "1"), ("漢", HOSTILE)], right=(1,)))
        console.result({"a": 1}, text=Text("styled", style="bold red"))
    printed, *table, styled = capsys.readouterr().out.splitlines()
    assert (printed, styled) == (text, "styled")
    width = len(ESCAPED)
    # The last name is two columns wide.
    assert table == [f"{'name':90}  {'value':>{width}}", f"{'a' * 90}  {'1':>{width}}", f"{'漢':89}  {ESCAPED}"]


def test_a_terminal_breaks_text_between_words_and_keeps_commands_on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch, width=40)
    words = "a warning of several long words that is longer than the terminal is wide"
    suggestion = "  discern finetune " + "x" * 50
    _print(Terminal(stderr=False), f"{words}\n{suggestion}\n\nend")
    lines = stream.getvalue().splitlines()
    assert [word for line in lines[:2] for word in line.split()] == words.split()
    assert lines[2:] == [suggestion, "", "end"]


def test_control_characters_are_escaped_and_other_text_stays() -> None:
    assert printable(HOSTILE) == ESCAPED
    text = "tab\tand\nline, [red]markup[/red], Café, 日本語, 👩\u200d👩, می\u200cخواهم"
    assert printable(text) == text
    assert printable(b"name-\xff.txt".decode("utf-8", "surrogateescape")) == r"name-\xff.txt"
    assert printable("half \ud83d") == r"half \ud83d"


def test_untrusted_text_is_escaped_wherever_it_is_printed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    print_error(f"no file {HOSTILE}", f"did you mean {HOSTILE}?")
    with command(json_output=False) as console:
        console.warn(HOSTILE)
        console.progress.note(HOSTILE)
        console.progress.start(HOSTILE, 3, HOSTILE)
        console.print(HOSTILE)
        console.lines([f"0.5\t{HOSTILE}"])  # a program gets the text as it is
    out, err = capsys.readouterr()
    assert (out, err.count(ESCAPED)) == (f"{ESCAPED}\n0.5\t{HOSTILE}\n", 6)
    stream = terminal(monkeypatch, width=200)
    bar = Display(Terminal(stderr=False))
    bar.start(HOSTILE, 3, HOSTILE)
    bar.advance(1, loss=HOSTILE)
    with command(json_output=False) as console:
        console.lines([HOSTILE])
    bar.finish()
    shown = stream.getvalue()
    assert shown.count(ESCAPED) >= 4
    assert not any(control in shown for control in ("\x1b[31m", "\x07", "\x9b", "\u202e", "\u2066", "\x7f"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_verb_with_its_code_after_cleaning_up(number: int, code: int) -> None:
    done = run(f"try:\n    os.kill(os.getpid(), {int(number)}); time.sleep(10)\nfinally:\n    print('cleaned')")
    assert (done.returncode, done.stdout) == (code, "cleaned\n")
    assert "Traceback" not in done.stderr


def test_a_closed_terminal_does_not_end_a_command_under_nohup() -> None:
    body = "os.kill(os.getpid(), signal.SIGHUP)\nc.print('on')"
    done = run(body, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert (done.returncode, done.stdout) == (0, "on\n")


@pytest.mark.parametrize("trains", [False, True])
def test_a_rank_in_the_environment_silences_nothing(trains: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("RANK", "1")  # as clusters leave it in every process
    with command(json_output=True, trains=trains) as console:
        console.result({"a": 1}, text="")
        console.explain(DataError("damaged"))
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": 1}
    assert "error: damaged" in err
    ignored = "warning: the environment sets RANK=1 but not WORLD_SIZE and MASTER_ADDR and MASTER_PORT; this is ignored"
    assert (ignored in err) == trains


def test_of_several_processes_that_train_only_the_first_prints(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with command(json_output=True, trains=True) as console:
        console.result({"a": 1}, text="")
        console.explain(DataError("printed by the first"))
        assert capsys.readouterr() == ("", "")
        console.explain(RanksError("the first may be the one that is lost"))
    assert "may be the one" in capsys.readouterr().err


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(program("os.read(0, 1)\nc.print('x' * 100_000)"), **pipes) as process:
        for stream in (process.stdout, process.stdin):
            cast("IO[bytes]", stream).close()
        assert cast("IO[bytes]", process.stderr).read() == b""
        assert process.wait() == 141  # as of other commands in a pipeline


def test_a_broken_pipe_of_the_work_is_an_error_like_others() -> None:
    done = run("raise BrokenPipeError('a worker died')")
    assert done.returncode == 1
    assert "a worker died" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_any_text_can_be_printed_in_any_encoding(encoding: str) -> None:
    body = "c.print('é\\udc80漢 ━')\nc.json_output = True\nc.result({'token': 'é\\udc80漢'}, text='')"
    done = run(body, env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[1])["token"][0] == "é"
