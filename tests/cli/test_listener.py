"""Progress for a reader who goes away."""

from __future__ import annotations

import pytest

from discern.cli import progress as listener
from discern.cli.progress import Listener
from discern.training.interrupt import stop_on_signals
from tests.training.test_loop import Notes


class Breaks(Notes):
    """A stream that takes one line."""

    def __init__(self, error: type[OSError]) -> None:
        super().__init__()
        self.error = error

    def note(self, message: str) -> None:
        if self.notes:
            raise self.error
        super().note(message)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams of the tests stay as they are."""
    monkeypatch.setattr(listener, "drop_unread", lambda: True)


def test_training_saves_and_stops_when_nobody_reads_its_progress() -> None:
    told = Breaks(BrokenPipeError)
    with stop_on_signals() as request:
        heard = Listener(told)
        heard.note("one")
        assert not request.requested
        heard.note("two")
        assert request.signal == 13
        heard.advance(1.0, loss="1")
        heard.finish()
    assert told.notes == ["one"]


def test_other_work_ends_when_nobody_reads_its_progress() -> None:
    heard = Listener(Breaks(BrokenPipeError))
    heard.note("one")
    with pytest.raises(SystemExit) as caught:
        heard.note("two")
    assert caught.value.code == 141
    heard.finish()


def test_a_line_that_cannot_be_written_ends_no_work() -> None:
    told = Breaks(OSError)
    with stop_on_signals() as request:
        heard = Listener(told)
        heard.note("one")
        heard.note("lost")
        heard.advance(1.0)
    assert told.notes == ["one"]
    assert not request.requested
