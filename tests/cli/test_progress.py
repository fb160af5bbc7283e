"""Progress as a bar on a terminal and as lines elsewhere, also for a reader who goes away."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from discern.cli import progress
from discern.cli.progress import Display, Listener
from discern.progress import BudgetProgress
from discern.training.process import stop_on_signals
from tests.small.task import Notes

# A command that prints results while its bar is shown.
PRINTING = """
from discern.cli.console import Console
console = Console(json_output=False)
console.progress.start("reading", 40, "lines")
console.print("a result")
console.lines(["a\\tline"])
console.progress.finish()
"""


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def lines(clock: Clock, stream: io.StringIO) -> Display:
    return Display(Console(file=stream, width=10_000), clock)


def bar(clock: Clock, stream: io.StringIO, width: int) -> Display:
    return Display(Console(file=stream, force_terminal=True, width=width, color_system=None), clock)


def test_lines_come_at_growing_intervals(lines: Display, clock: Clock, stream: io.StringIO) -> None:
    lines.start("pre-training", 100_000, "steps")
    for second in range(1, 36_001):
        clock.now = second
        lines.advance(1, loss="1.0")
    lines.finish()
    shown = stream.getvalue().splitlines()
    assert shown[:2] == ["pre-training: 100,000 steps", "pre-training: 10/100,000 steps  27:46:30 left  loss 1.0"]
    assert 50 < len(shown) < 250
    assert shown[-1] == "pre-training: 36,000/100,000 steps  in 10:00:00  loss 1.0"


def test_the_remaining_time_does_not_count_earlier_work(lines: Display, clock: Clock, stream: io.StringIO) -> None:
    lines.start("pre-training", 1000, "steps")
    lines.advance(900)
    clock.now = 10
    lines.advance(10)
    assert stream.getvalue().splitlines()[-1] == "pre-training: 910/1,000 steps  1:30 left"


def test_short_stages_end_silently_and_a_new_one_ends_the_last(lines: Display, clock: Clock, stream: io.StringIO) -> None:
    lines.start("reading", None, "bytes")
    clock.now = 1.5
    lines.note("x" * 200 + " [bold]")
    lines.start("writing", 10_000_000, "bytes")
    lines.advance(2_500_000, documents="12")
    clock.now = 5
    lines.start("training the tokenizer", None, "")
    clock.now = 12
    lines.finish()
    lines.advance(1)
    assert stream.getvalue().splitlines() == [
        "reading",
        "x" * 200 + " [bold]",
        "writing: 10.0 MB",
        "writing: 2.5 MB of 10.0 MB  in 0:04  documents 12",
        "training the tokenizer",
        "training the tokenizer: in 0:07",
    ]


@pytest.mark.parametrize(
    ("seconds", "used", "units", "shown"),
    [
        (3600, 600.0, None, "33%  40:00 left  time 20:00/1:00:00  steps 300"),
        (36_000, 0.0, 2000, "15%  1:53:20 left  time 10:00/10:00:00  steps 300"),
    ],
)
def test_a_time_budget(
    lines: Display, clock: Clock, stream: io.StringIO, seconds: float, used: float, units: float | None, shown: str
) -> None:
    budget = BudgetProgress(lines, seconds, used=used, max_units=units, clock=clock)
    budget.start("pre-training", units, "steps")
    budget.advance(150)
    clock.now = 600
    budget.advance(150)
    assert stream.getvalue().replace("40:01", "40:00").splitlines() == ["pre-training", f"pre-training: {shown}"]


def test_a_bar_shows_amounts_metrics_and_notes(clock: Clock, stream: io.StringIO) -> None:
    display = bar(clock, stream, 100)
    display.start("pre-training", 40, "steps")
    display.advance(40, loss="8.5", learning_rate="1e-3")
    display.note("step 40: saved [bold] " + "word " * 30)
    display.start("reading", None, "bytes")
    display.advance(1_000_000)
    display.finish()
    shown = stream.getvalue()
    assert all(part in shown for part in ("40/40 steps", "loss 8.5  learning rate 1e-3", "step 40: saved [bold]", "1.0 MB"))
    assert max(line.count("word") for line in shown.splitlines()) < 20, "notes break between words"


def test_a_narrow_terminal_cuts_the_last_metrics(clock: Clock, stream: io.StringIO) -> None:
    display = bar(clock, stream, 60)
    display.start("pre-training", 200, "steps")
    display.advance(200, loss="6.010", tokens_per_second="12.3k", learning_rate="1e-4")
    clock.now = 3
    display.finish()
    last = stream.getvalue().replace("\r", "\n").split("\n")[-2]
    assert all(part in last for part in ("pre-training", "200/200 steps", "loss 6.010", "…"))
    assert "1e-4" not in last


def test_a_brief_stage_leaves_no_bar(clock: Clock, stream: io.StringIO) -> None:
    display = bar(clock, stream, 60)
    for seconds in (3, 1):
        display.start("reading", 40, "lines")
        clock.now += seconds
        display.finish()
        erased = stream.getvalue().rsplit("reading", 1)[1].endswith("\x1b[1A\x1b[2K")
        assert erased == (seconds == 1)


def test_a_notebook_shows_one_bar_for_each_stage_and_needs_no_widgets(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str | dict[str, str]] = []

    class Cell:
        def update(self, bar: Any, raw: bool = False) -> None:
            shown.append(bar if raw else bar._repr_mimebundle_([], [])["text/html"])

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=lambda bar, display_id: Cell()))
    display = Display(Console(force_jupyter=True), clock)
    display.start("pre-training", 10, "steps")
    for _ in range(10):  # more often than a reader can see
        clock.now += 0.1
        display.advance(1)
    clock.now += 2
    display.finish()
    assert [re.findall(r"(\d+)/10 steps", each)[0] for each in shown] == ["1", "4", "7", "10", "10"]
    display.start("evaluating", 2, "rows")
    display.finish()
    assert shown[-1] == {"text/html": ""}, "a brief stage leaves no bar"


def test_results_on_the_terminal_of_the_bar_are_printed_above_it() -> None:
    leader, follower = os.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "60", "NO_COLOR": "1"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    subprocess.run([sys.executable, "-c", PRINTING], **streams, env=environment, check=True, timeout=60)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # the end of the output
        while read := os.read(leader, 65536):
            shown += read
    os.close(leader)
    for printed in (b"a result", b"a\tline"):
        assert shown.split(printed)[0].endswith(b"\r\x1b[2K"), shown  # the line of the bar was erased
        assert shown.split(printed)[1].startswith(b"\r\n")


def test_redirected_results_stay_on_stdout_even_with_forced_colors(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        environment = os.environ | {"FORCE_COLOR": "1"}
        subprocess.run([sys.executable, "-c", PRINTING], stdout=out, stderr=err, env=environment, check=True, timeout=60)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "a result\na\tline\n"


class Breaks(Notes):
    """A stream that takes one line."""

    def __init__(self, error: type[OSError]) -> None:
        super().__init__()
        self.error = error

    def note(self, message: str) -> None:
        if self.lines:
            raise self.error
        super().note(message)


@pytest.mark.parametrize(("error", "received"), [(BrokenPipeError, 13), (OSError, None)])
def test_training_saves_and_stops_only_when_nobody_reads_its_progress(
    error: type[OSError], received: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "drop_unread", lambda: True)  # leaves the streams of the tests as they are
    inner = Breaks(error)
    with stop_on_signals() as request:
        listener = Listener(inner)
        listener.note("one")
        assert not request.requested
        listener.note("two")
        listener.advance(1.0, loss="1")
        listener.finish()
        assert request.signal == received
    assert inner.lines == ["one"]


def test_other_work_ends_when_nobody_reads_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "drop_unread", lambda: True)
    listener = Listener(Breaks(BrokenPipeError))
    listener.note("one")
    with pytest.raises(SystemExit) as caught:
        listener.note("two")
    assert caught.value.code == 141
