"""What every verb prints with: results on stdout, everything else on stderr, and exit codes that scripts can rely on."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Annotated, TypeAlias

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from discern.cli.json_values import jsonable
from discern.cli.listener import Listener, drop_unread
from discern.cli.progress import progress_on
from discern.cli.tables import fitting
from discern.cli.terminal import Terminal, json_text, one_line, printable
from discern.errors import ConfigError, DiscernError, RanksError
from discern.progress import Progress, Silent
from discern.training.interrupt import handled
from discern.training.place import missing_of_place, place

JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]

_PANIC = "PanicException"
INTERRUPTED = 130
_COMMANDS = ("discern ", "pip ", "hint: discern ", "AutoTokenizer.", "AutoModel")


class Console:
    """Where a verb prints: `result` and `print` on stdout, `warn` and `progress` on stderr.

    Text is printed as it is, but for control characters, which are spelled out: brackets are no markup. To colour, pass
    rich's `Text` or `Table`; away from a terminal they lose colours and boxes, and lines are never wrapped. Of several
    processes that train together only the first prints.

    Args:
        trains: whether the verb does; only then may this process be one of several.
    """

    def __init__(self, *, json_output: bool, trains: bool = False) -> None:
        self.json_output = json_output
        self._out = _rich(stderr=False)
        self._err = _rich(stderr=True)
        self._speaks = not trains or _is_first()
        self.progress: Progress = Listener(progress_on(self._err)) if self._speaks else Silent()

    def result(self, values: Mapping[str, object], *, text: RenderableType | str) -> None:
        """What the verb found: `values` as one JSON object under --json, `text` for people otherwise."""
        if self.json_output and self._speaks:
            self._out.file.write(self._json(values) + "\n")
        else:
            self.print(text)

    def records(self, records: Iterable[Mapping[str, object]]) -> None:
        """JSON lines on stdout: results of which there are many."""
        if not self._speaks:
            return
        self._out.file.writelines(self._json(record) + "\n" for record in records)

    def _json(self, value: object) -> str:
        """One line of JSON, in UTF-8 where the stream takes it."""
        return json_text(json.dumps(jsonable(value), ensure_ascii=not _unicode(self._out), allow_nan=False))

    def lines(self, lines: Iterable[str]) -> None:
        """Lines for other programs on stdout, with their tabs; nothing under --json."""
        if self._speaks and not self.json_output:
            spelled = printable if self._out.is_terminal else one_line
            self._out.file.writelines(spelled(line) + "\n" for line in lines)

    def print(self, renderable: RenderableType | str) -> None:
        """A line or a table for people, on stdout; nothing under --json."""
        if self._speaks and not self.json_output:
            _print(self._out, renderable)

    def warn(self, message: str) -> None:
        """Something that does not stop the work but that its reader should know, on stderr."""
        if self._speaks:
            _print(self._err, Text.assemble(("warning: ", "yellow"), printable(message)))

    def explain(self, error: DiscernError) -> None:
        """What is wrong; it is wrong in all of several processes, so one says it. A lost process is told by all that miss it."""
        if self._speaks or isinstance(error, RanksError):
            print_error(error.message, error.hint)

    def local_model(self, name: Path) -> Path:
        """The folder of a model, which is downloaded if its name is one on the Hugging Face Hub."""
        from discern.interop.hub import local_model

        return local_model(name, self.progress.note)

    def fail(self) -> None:
        """End with exit code 1 after a result that is a failure; of several processes the one that printed it."""
        if self._speaks:
            raise SystemExit(1)


@contextmanager
def command(*, json_output: bool, trains: bool = False) -> Iterator[Console]:
    """The frame of a verb: a console to print with; errors become a message and an exit code.

    Exit codes: 0; 1 it failed; 2 it was asked wrongly; 128 plus the number of the signal that ended it: 129 the terminal was
    closed, 130 interrupted, 141 nobody reads the progress any more, 143 terminated. With DISCERN_DEBUG=1 in the environment
    every error shows its traceback.

    Args:
        trains: whether the verb may run in several processes that torchrun or `--nproc` started.
    """
    console = Console(json_output=json_output, trains=trains)
    restore = _raise_on_signals()
    try:
        if trains and (missing := missing_of_place()):
            found = " and ".join(f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if os.environ.get(name))
            console.warn(f"the environment has {found} but no {' and '.join(missing)}: ignored, as this process runs alone")
        yield console
        sys.stdout.flush()
    except BaseException as error:
        console.progress.finish()
        raise SystemExit(explained(error, console)) from None
    finally:
        console.progress.finish()
        restore()


def _is_first() -> bool:
    """Whether this process is the one of several that prints."""
    try:
        return place().rank == 0
    except ConfigError:  # the work says so
        return True


def print_error(message: str, hint: str | None = None) -> None:
    """An error and what to do about it, on stderr."""
    text = Text.assemble(("error: ", "bold red"), printable(message))
    if hint:
        text.append("\n  hint: ", style="cyan").append(printable(hint))
    with suppress(OSError):  # a terminal that was closed
        _print(_rich(stderr=True), text)


def explained(error: BaseException, console: Console) -> int:
    """Tell of what ended a verb, on stderr; returns the exit code."""
    if isinstance(error, SystemExit | typer.Exit):
        return _exit_code(error)
    if isinstance(error, BrokenPipeError) and drop_unread():  # `| head` has seen enough
        return 1
    if os.environ.get("DISCERN_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        print_error("interrupted")
        return INTERRUPTED
    if isinstance(error, DiscernError):
        console.explain(error)
        return error.exit_code
    if type(error).__name__ == _PANIC:  # of the tokenizers library, and no Exception
        print_error(
            f"the tokenizer failed on this text: {error}",
            "a pattern or a table in tokenizer.json is damaged, or takes too long on this text; use another tokenizer or model",
        )
        return 1
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = os.fsdecode(error.filename) if error.filename else "a file name"
        print_error(f"{name[:200]}... is too long a name for this file system", "choose a shorter name")
        return 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        print_error("there is no space left where the output goes", "free some space, then run the same command again")
        return 1
    what = " ".join(str(error).split()) or "no message"
    print_error(f"{type(error).__name__}: {what}", "discern did not expect this; DISCERN_DEBUG=1 shows where it happened")
    return 1


def _raise_on_signals() -> Callable[[], None]:
    """Have SIGTERM and SIGHUP raise SystemExit in the main thread, so that open work is saved or removed; returns the undoing."""
    before = {number: signal.signal(number, _terminate) for number in handled() if number != signal.SIGINT}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _exit_code(error: SystemExit | typer.Exit) -> int:
    """The code that an exit carries; a text instead of a code is printed and means failure."""
    code = error.exit_code if isinstance(error, typer.Exit) else error.code
    if isinstance(code, str):
        print_error(code)
        return 1
    return code or 0


def _rich(*, stderr: bool) -> Terminal:
    """A console that prints text as it is, and away from a terminal never folds a line."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, TextIOWrapper):  # a file name or a token may hold what the encoding of the stream does not
        stream.reconfigure(errors="backslashreplace")
    console = Terminal(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def _print(console: Terminal, renderable: RenderableType | str) -> None:
    """Print on one line what is one line; on a terminal a table adapts to its width, and text breaks between words."""
    if isinstance(renderable, Table):
        if console.is_terminal:
            for part in fitting(renderable, console.width):
                console.print(part)
            return
        renderable = _aligned(renderable, console)
    if not console.is_terminal or not isinstance(renderable, str | Text):
        console.print(renderable, soft_wrap=True)
        return
    text = Text(renderable) if isinstance(renderable, str) else renderable
    for line in text.split("\n", allow_blank=True):
        # A command is left to the terminal, so that it can be copied.
        console.print(line, soft_wrap=line.plain.lstrip().startswith(_COMMANDS))


def _aligned(table: Table, console: Terminal) -> str:
    """A table as columns of plain text: no box, no colour, no blanks at the end of a line."""
    bare = copy(table)
    bare.box, bare.expand, bare.pad_edge = None, False, False
    with console.capture() as capture:
        console.print(bare)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _unicode(console: Terminal) -> bool:
    return console.encoding.startswith("utf")
