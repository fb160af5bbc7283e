"""The console of every verb: results on stdout, everything else on stderr, and reliable exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import FrameType
from typing import Any

import typer
from pydantic_core import to_jsonable_python
from rich.cells import cell_len
from rich.segment import Segment, Segments
from rich.text import Text

from discern.cli.progress import READER_GONE, Display, Listener, Terminal, drop_unread, json_text, printable
from discern.errors import ConfigError, DiscernError, RanksError
from discern.progress import Progress, Silent
from discern.training.process import missing_variables, rank_environment

INTERRUPTED = 130
_PANIC = "PanicException"
_COMMANDS = ("discern ", "pip ", "hint: discern ", "AutoTokenizer.", "AutoModel")


class Console:
    """The output of a verb: `result` and `print` on stdout, `warn` and `progress` on stderr.

    Text is printed unchanged, except that control characters are escaped; brackets are not markup. Outside of a terminal, colors
    are omitted and lines are never wrapped. If several processes train together, only the first one prints.

    Args:
        trains: whether the verb trains, so that this process may be one of several.
    """

    def __init__(self, *, json_output: bool, trains: bool = False) -> None:
        self.json_output = json_output
        self._out, self._err = _terminal(stderr=False), _terminal(stderr=True)
        self._display = Display(self._err)
        is_first = True
        with suppress(ConfigError):  # reported later
            is_first = rank_environment().rank == 0
        self._speaks = not trains or is_first
        self.progress: Progress = Listener(self._display) if self._speaks else Silent()

    @property
    def has_color(self) -> bool:
        """Whether stdout shows colors."""
        return self._out.color_system is not None and not self._out.no_color

    def result(self, values: Mapping[str, object], *, text: Text | str) -> None:
        """Print the result of a verb: `values` as one JSON object with --json, otherwise `text`."""
        if self.json_output:
            self.records([values])
        else:
            self.print(text)
        self._out.file.flush()  # a reader may wait for it while the verb goes on

    def records(self, records: Iterable[Mapping[str, object]]) -> None:
        """Print results as JSON lines on stdout, in UTF-8 if the stream supports it."""
        is_ascii = not self._out.encoding.startswith("utf")
        if self._speaks:
            self._write(json_text(json.dumps(jsonable(record), ensure_ascii=is_ascii, allow_nan=False)) for record in records)

    def lines(self, lines: Iterable[str]) -> None:
        """Print lines for other programs on stdout, including tabs; nothing with --json."""
        if self._speaks and not self.json_output:
            escaped = printable if self._out.is_terminal else str
            self._write(map(escaped, lines))

    def print(self, text: Text | str) -> None:
        """Print text on stdout; nothing with --json."""
        if self._speaks and not self.json_output:
            _print(self._err if self._has_bar else self._out, text)

    def _write(self, lines: Iterable[str]) -> None:
        if not self._has_bar:
            self._out.file.writelines(f"{line}\n" for line in lines)
            return
        for line in lines:  # as `Text` its tabs would be expanded
            self._err.print(Segments([Segment(line), Segment.line()]), end="", soft_wrap=True)

    @property
    def _has_bar(self) -> bool:
        """Whether stdout is the terminal that shows the bar. Then only the console of the bar prints above it."""
        # rich takes a file for a terminal if the environment says so (FORCE_COLOR).
        return self._display.shows_bar and self._out.file.isatty() and self._err.file.isatty()

    def warn(self, message: str) -> None:
        """Print a warning on stderr."""
        self.progress.note(f"warning: {message}")

    def explain(self, error: DiscernError) -> None:
        """Print an error on stderr. Of several processes only the first prints it, except for the loss of a process."""
        if self._speaks or isinstance(error, RanksError):
            print_error(error.message, error.hint)

    def fail(self) -> None:
        """Exit with code 1 after a result that is a failure; of several processes, only the one that printed it."""
        if self._speaks:
            raise SystemExit(1)


@contextmanager
def command(*, json_output: bool, trains: bool = False) -> Iterator[Console]:
    """Run a verb: provides its console and turns errors into a message and an exit code.

    Exit codes: 0 success; 1 failure; 2 wrong usage; 128 plus the number of the signal that ended the verb: 129 terminal closed,
    130 interrupted, 141 reader of the output gone, 143 terminated. With DISCERN_DEBUG=1 in the environment, every error shows
    its traceback.

    Args:
        json_output: whether to print JSON.
        trains: whether the verb may run in several processes that torchrun or `--nproc` started.
    """
    console = Console(json_output=json_output, trains=trains)
    # SIGTERM and SIGHUP raise SystemExit in the main thread, so that work is saved or cleaned up.
    stopping = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    in_main = threading.current_thread() is threading.main_thread()
    heard = [number for number in stopping if in_main and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _terminate) for number in heard}
    try:
        if trains and (missing := missing_variables()):
            found = " and ".join(f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if os.environ.get(name))
            console.warn(
                f"the environment sets {found} but not {' and '.join(missing)}; this is ignored, and the process runs alone"
            )
        yield console
        sys.stdout.flush()
    except BaseException as error:
        console.progress.finish()
        raise SystemExit(explained(error, console)) from None
    finally:
        console.progress.finish()
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def print_error(message: str, hint: str | None = None) -> None:
    """Print an error and what to do about it on stderr."""
    text = Text.assemble(("error: ", "bold red"), printable(message))
    if hint:
        text.append("\n  hint: ", style="cyan").append(printable(hint))
    with suppress(OSError):  # the terminal was closed
        _print(_terminal(stderr=True), text)


def explained(error: BaseException, console: Console) -> int:
    """Print the error that ended a verb on stderr; returns the exit code."""
    if isinstance(error, SystemExit | typer.Exit):
        if isinstance(error.__context__, RanksError):  # stopped by torchrun before it could report the end of another process
            console.explain(error.__context__)
        code = error.exit_code if isinstance(error, typer.Exit) else error.code
        return code if isinstance(code, int) else 0 if code is None else 1
    if isinstance(error, BrokenPipeError) and drop_unread():  # `| head` has seen enough
        return READER_GONE
    if os.environ.get("DISCERN_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        if not error.args:  # nobody has said what is saved
            console.progress.note("stopped; to start again, or to continue saved work, run the same command")
        return INTERRUPTED
    if isinstance(error, DiscernError):
        console.explain(error)
        return error.exit_code
    if type(error).__name__ == _PANIC:  # raised by the tokenizers library, and not an Exception
        print_error(
            f"the tokenizer failed on this text: {error}",
            "a pattern or a table in tokenizer.json is damaged, or takes too long on this text; use another tokenizer or model",
        )
        return 1
    hint = "this error is unexpected; set DISCERN_DEBUG=1 and run the command again to see where it happened"
    if isinstance(error, OSError):
        hint = "check the name, its permissions and the free space, then run the same command again"
    print_error(f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}", hint)
    return 1


def _terminal(*, stderr: bool) -> Terminal:
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, TextIOWrapper):  # a file name or a token may contain characters that the encoding of the stream lacks
        stream.reconfigure(errors="backslashreplace")
    return Terminal(stderr=stderr)


def _print(terminal: Terminal, text: Text | str) -> None:
    """Print text, which a terminal wraps between words. Commands and columns are not wrapped, so that they can be copied."""
    for line in (Text(printable(text)) if isinstance(text, str) else text).split("\n", allow_blank=True):
        plain = line.plain.lstrip()
        terminal.print(line, soft_wrap=not terminal.is_terminal or "  " in plain or plain.startswith(_COMMANDS))


def columns(heading: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> str:
    """A table as aligned columns.

    Args:
        right: indices of the columns that are aligned on the right.
    """
    table = [[printable(str(cell)) for cell in row] for row in (heading, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        padding = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = (
            space + cell if index in right else cell + space for index, (cell, space) in enumerate(zip(row, padding, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def progress_display() -> Progress:
    """Progress on stderr: a bar on a terminal, lines elsewhere."""
    return Listener(Display(_terminal(stderr=True)))


def jsonable(value: Any) -> Any:
    """`value` in the types of JSON: NaN and infinities become null, arrays and tensors lists, and paths strings."""
    # numpy and torch, scalars and arrays, without importing either
    return to_jsonable_python(
        value, inf_nan_mode="null", fallback=lambda other: other.tolist() if hasattr(other, "tolist") else str(other)
    )
