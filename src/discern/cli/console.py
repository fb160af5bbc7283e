"""The console of every verb: results on stdout, everything else on stderr, and reliable exit codes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeAlias

import typer
from pydantic_core import to_jsonable_python
from rich.console import RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from discern.cli.progress import (
    READER_GONE,
    Display,
    Listener,
    Terminal,
    drop_unread,
    fitting,
    json_text,
    one_line,
    printable,
    same_terminal,
)
from discern.errors import ConfigError, DiscernError, RanksError
from discern.progress import Progress, Silent
from discern.training.rank_environment import missing_variables, rank_environment

JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]

_PANIC = "PanicException"
INTERRUPTED = 130
_COMMANDS = ("discern ", "pip ", "hint: discern ", "AutoTokenizer.", "AutoModel")


class Console:
    """The output of a verb: `result` and `print` on stdout, `warn` and `progress` on stderr.

    Text is printed unchanged, except that control characters are escaped; brackets are not markup. For color, pass rich's
    `Text` or `Table`. Outside of a terminal, colors and boxes are omitted and lines are never wrapped. If several processes
    train together, only the first one prints.

    Args:
        trains: whether the verb trains, so that this process may be one of several.
    """

    def __init__(self, *, json_output: bool, trains: bool = False) -> None:
        self.json_output = json_output
        self._out = _rich(stderr=False)
        self._err = _rich(stderr=True)
        self._speaks = not trains or _is_first()
        self._display = Display(self._err)
        self.progress: Progress = Listener(self._display) if self._speaks else Silent()

    def result(self, values: Mapping[str, object], *, text: RenderableType | str) -> None:
        """Print the result of a verb: `values` as one JSON object with --json, otherwise `text`."""
        if self.json_output and self._speaks:
            self._write_lines([self._json(values)])
        else:
            self.print(text)

    def flush(self) -> None:
        """Hand over what was printed to a reader that waits for it, while the verb goes on."""
        self._out.file.flush()

    def records(self, records: Iterable[Mapping[str, object]]) -> None:
        """Print many results as JSON lines on stdout."""
        if self._speaks:
            self._write_lines(self._json(record) for record in records)

    def _json(self, value: object) -> str:
        """One line of JSON, in UTF-8 if the stream supports it."""
        return json_text(json.dumps(jsonable(value), ensure_ascii=not _unicode(self._out), allow_nan=False))

    def lines(self, lines: Iterable[str]) -> None:
        """Print lines for other programs on stdout, including tabs; nothing with --json."""
        if self._speaks and not self.json_output:
            spelled = printable if self._out.is_terminal else one_line
            self._write_lines(spelled(line) for line in lines)

    def print(self, renderable: RenderableType | str) -> None:
        """Print a line or a table on stdout; nothing with --json."""
        if self._speaks and not self.json_output:
            _print(self._err if self._under_bar() else self._out, renderable)

    def _write_lines(self, lines: Iterable[str]) -> None:
        if not self._under_bar():
            self._out.file.writelines(line + "\n" for line in lines)
            return
        for line in lines:
            # As it is: a `Text` would have its tabs expanded.
            self._err.print(Segments([Segment(line), Segment.line()]), end="", soft_wrap=True)

    def _under_bar(self) -> bool:
        """Whether stdout is the terminal that shows the progress bar: then only the console of the bar prints above the bar."""
        return self._display.shows_bar and same_terminal(self._out.file, self._err.file)

    def warn(self, message: str) -> None:
        """Print a warning on stderr."""
        if self._speaks:
            _print(self._err, Text.assemble(("warning: ", "yellow"), printable(message)))

    def explain(self, error: DiscernError) -> None:
        """Print an error on stderr. Of several processes only the first prints it, except for the loss of a process."""
        if self._speaks or isinstance(error, RanksError):
            print_error(error.message, error.hint)

    def local_model(self, name: Path) -> Path:
        """The folder of a model, which is downloaded if it is given by its name on the Hugging Face Hub."""
        if name.exists():
            return name
        from discern.model_files.hub import local_model

        return local_model(name, self.progress.note)

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
    restore = _raise_on_signals()
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
        restore()


def _is_first() -> bool:
    """Whether this process is the first of several, which prints."""
    try:
        return rank_environment().rank == 0
    except ConfigError:  # reported later
        return True


def print_error(message: str, hint: str | None = None) -> None:
    """Print an error and what to do about it on stderr."""
    text = Text.assemble(("error: ", "bold red"), printable(message))
    if hint:
        text.append("\n  hint: ", style="cyan").append(printable(hint))
    with suppress(OSError):  # the terminal was closed
        _print(_rich(stderr=True), text)


def explained(error: BaseException, console: Console) -> int:
    """Print the error that ended a verb on stderr; returns the exit code."""
    if isinstance(error, SystemExit | typer.Exit):
        if isinstance(error.__context__, RanksError):  # stopped by torchrun before it could report the end of another process
            console.explain(error.__context__)
        return _exit_code(error)
    if isinstance(error, BrokenPipeError) and drop_unread():  # `| head` has seen enough
        return READER_GONE
    if os.environ.get("DISCERN_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        if not error.args:  # nobody has said what is saved
            console.progress.note("interrupted; to start again, or to continue saved work, run the same command")
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
    what = " ".join(str(error).split()) or "no message"
    hint = "this error is unexpected; set DISCERN_DEBUG=1 and run the command again to see where it happened"
    if isinstance(error, OSError):
        hint = "check the name, its permissions and the free space, then run the same command again"
    print_error(f"{type(error).__name__}: {what}", hint)
    return 1


def _raise_on_signals() -> Callable[[], None]:
    """Make SIGTERM and SIGHUP raise SystemExit in the main thread, so that work is saved or cleaned up.

    Returns:
        A function that restores the previous handlers.
    """
    stopping = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    own = threading.current_thread() is threading.main_thread()
    heard = [number for number in stopping if own and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _terminate) for number in heard}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _exit_code(error: SystemExit | typer.Exit) -> int:
    """The exit code of an exit. A message in place of the code is printed and means failure."""
    code = error.exit_code if isinstance(error, typer.Exit) else error.code
    if isinstance(code, str):
        print_error(code)
        return 1
    return code or 0


def _rich(*, stderr: bool) -> Terminal:
    """A console that prints text unchanged and, outside of a terminal, never wraps lines."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, TextIOWrapper):  # a file name or a token may contain characters that the encoding of the stream lacks
        stream.reconfigure(errors="backslashreplace")
    console = Terminal(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def _print(console: Terminal, renderable: RenderableType | str) -> None:
    """Print text or a table. On a terminal, tables fit its width and text is wrapped between words."""
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
        # Commands are not wrapped, so that they can be copied.
        console.print(line, soft_wrap=line.plain.lstrip().startswith(_COMMANDS))


def _aligned(table: Table, console: Terminal) -> str:
    """A table as columns of plain text, without box, color or trailing spaces."""
    bare = copy(table)
    bare.box, bare.expand, bare.pad_edge = None, False, False
    with console.capture() as capture:
        console.print(bare)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def progress_display() -> Progress:
    """Progress on stderr: a bar on a terminal, lines elsewhere."""
    return Display(_rich(stderr=True))


def _unicode(console: Terminal) -> bool:
    return console.encoding.startswith("utf")


def jsonable(value: Any) -> Any:
    """`value` in the types of JSON: NaN and infinities become null, arrays and tensors lists, and paths strings."""
    # numpy and torch, scalars and arrays, without importing either
    return to_jsonable_python(
        value, inf_nan_mode="null", fallback=lambda other: other.tolist() if hasattr(other, "tolist") else str(other)
    )


def refuse_text_as_file(file: Path | None) -> None:
    """Raise a ConfigError for a sentence given in place of a file."""
    if file is not None and " " in str(file).strip() and not file.exists():
        raise ConfigError(f"there is no file '{file}'", hint=f"to give a text itself: --text {shlex.quote(str(file))}")


def typed_text(text: str, name: str) -> str:
    """A text from the command line, checked to be UTF-8, because a shell passes bytes.

    Args:
        name: name of the argument, for the message.

    Raises:
        ConfigError: the text is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        byte = os.fsencode(text[problem.start])[0] if 0xDC80 <= ord(text[problem.start]) <= 0xDCFF else 0
        raise ConfigError(
            f"{name} is not UTF-8: byte 0x{byte:02x} at character {problem.start + 1}",
            hint="if the terminal uses another encoding, save the text to a file and convert it with iconv",
        ) from problem
    return text
