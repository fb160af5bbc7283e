from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.box import SQUARE
from rich.table import Table
from rich.text import Text

from discern.cli.console import command
from discern.errors import CheckpointError, ConfigError, DataError, RanksError


def program(body: str) -> list[str]:
    """The command of a process that is a verb with this body."""
    lines = ["import os, signal, sys, time", "from discern.cli.console import command", "with command(json_output=False) as c:"]
    return [sys.executable, "-c", "\n".join([*lines, *(f"    {line}" for line in body.splitlines())])]


def run(body: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """What becomes of a verb with this body, in a process of its own."""
    return subprocess.run(program(body), capture_output=True, text=True, check=False, **options)


def leave(error: BaseException) -> int:
    """The exit code of a verb that raises `error`."""
    with pytest.raises(SystemExit) as caught, command(json_output=False):
        raise error
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("asked wrongly"), 2),
        (DataError("no such file"), 1),
        (CheckpointError("damaged"), 1),
        (ValueError("a bug"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit(None), 0),
        (typer.Exit(3), 3),
    ],
)
def test_errors_become_exit_codes(error: BaseException, code: int):
    assert leave(error) == code


@pytest.mark.parametrize(("already_said", "lines"), [((), 1), (("stopped and saved",), 0)])
def test_ctrl_c_is_no_error_and_says_what_to_do_once(
    already_said: tuple[str, ...], lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(KeyboardInterrupt(*already_said)) == 130
    told = capsys.readouterr().err
    assert (told.count("run the same command"), len(told.splitlines())) == (lines, lines)
    assert "error" not in told


def test_an_error_is_its_message_and_its_hint_on_stderr(capsys: pytest.CaptureFixture[str]):
    leave(DataError("x" * 300 + " [MASK] [bold]", hint="type this"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {'x' * 300} [MASK] [bold]\n  hint: type this\n"


def test_an_unexpected_error_is_one_line_and_a_way_to_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    leave(ValueError("two\nlines"))
    assert capsys.readouterr().err.splitlines()[0] == "error: ValueError: two lines"
    leave(ValueError(""))
    told = capsys.readouterr().err
    assert "ValueError: no message" in told
    assert "DISCERN_DEBUG=1" in told
    assert "Traceback" not in told
    monkeypatch.setenv("DISCERN_DEBUG", "1")
    leave(DataError("deep"))
    assert "Traceback" in capsys.readouterr().err


def test_json_is_one_object_and_nothing_else_on_stdout(capsys: pytest.CaptureFixture[str]):
    with command(json_output=True) as console:
        console.print("for people")
        console.warn("careful")
        console.progress.start("working", 2, "steps")
        console.progress.advance(2, loss="1.0")
        console.result({"loss": float("nan"), "name": "Café"}, text="for people")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"loss": None, "name": "Café"}
    assert captured.out.count("\n") == 1
    assert "warning: careful" in captured.err


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]):
    long = "path/" * 60
    with command(json_output=False) as console:
        console.print(f"[bold]{long}[/bold] :smile: 1234 'x'")
        console.result({"a": 1}, text=Text("styled", style="bold red"))
    assert capsys.readouterr().out == f"[bold]{long}[/bold] :smile: 1234 'x'\nstyled\n"


def test_a_table_away_from_a_terminal_is_columns_without_box_or_fold(capsys: pytest.CaptureFixture[str]):
    table = Table("name", "value", box=SQUARE)
    table.add_row("a" * 90, "[red]1[/red]")
    with command(json_output=False) as console:
        console.print(table)
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()] == [["name", "value"], ["a" * 90, "[red]1[/red]"]]
    assert all(line == line.rstrip() for line in out.splitlines())
    assert table.box is SQUARE


def test_signals_leave_with_their_codes_and_clean_up(tmp_path: Path):
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)):
        mark = tmp_path / f"cleaned-{code}"
        done = run(
            f"try:\n    os.kill(os.getpid(), {int(number)}); time.sleep(10)\nfinally:\n    open({str(mark)!r}, 'w').close()"
        )
        assert (done.returncode, mark.exists()) == (code, True)
        assert "Traceback" not in done.stderr


def test_the_handler_of_sigterm_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with command(json_output=False):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_under_nohup_a_closed_terminal_ends_nothing():
    done = run(
        "os.kill(os.getpid(), signal.SIGHUP)\nc.print('on')", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert (done.returncode, done.stdout) == (0, "on\n")


@pytest.mark.parametrize("trains", [False, True])
def test_a_rank_in_the_environment_silences_nothing(
    trains: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RANK", "1")  # as clusters leave it in every process
    with command(json_output=True, trains=trains) as console:
        console.result({"a": 1}, text="")
    leave(DataError("damaged"))
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"a": 1}
    assert "error: damaged" in captured.err
    ignored = "warning: the environment sets RANK=1 but not WORLD_SIZE and MASTER_ADDR and MASTER_PORT; this is ignored"
    assert (ignored in captured.err) == trains


def test_of_several_processes_that_train_the_first_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with command(json_output=True, trains=True) as console:
        console.result({"a": 1}, text="")
        console.explain(DataError("what the first says"))
        assert capsys.readouterr() == ("", "")
        console.explain(RanksError("the first may be the one that is lost"))
    assert "may be the one" in capsys.readouterr().err


def test_it_works_outside_the_main_thread():
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(leave(DataError("x"))))
    thread.start()
    thread.join()
    assert codes == [1]


def test_a_reader_that_leaves_is_no_error():
    body = "os.read(0, 1)\nc.print('x' * 100_000)"
    process = subprocess.Popen(program(body), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 141  # as of other commands in a pipeline


def test_a_broken_pipe_of_the_work_is_an_error_like_others():
    done = run("raise BrokenPipeError('a worker died')")
    assert done.returncode == 1
    assert "a worker died" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_any_text_can_be_printed_in_any_encoding(encoding: str):
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = run("c.json_output = True\nc.result({'token': 'é\\udc80漢'}, text='')", env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token"][0] == "é"
    done = run("c.print('é\\udc80漢 ━')", env=environment)
    assert done.returncode == 0, done.stderr


def test_plain_output_holds_no_escape_codes_even_with_a_terminal_type():
    body = "c.warn('careful')\nc.progress.start('working', 3, 'steps')\nraise ValueError('x')"
    done = run(body, env=os.environ | {"TERM": "xterm-256color"})
    assert "\x1b" not in done.stderr
    assert done.stderr.startswith("warning: careful\nworking: 3 steps\n")


def test_stdout_may_be_any_stream(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    with command(json_output=True) as console:
        console.result({"a": 1}, text="")
    assert json.loads(stream.getvalue()) == {"a": 1}
