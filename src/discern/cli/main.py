"""The command `discern`: its verbs, its version, and errors in the command line."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from keyword import iskeyword
from typing import Annotated

import typer

import discern
from discern.cli.console import INTERRUPTED, Console, explained, print_error
from discern.cli.outputs import guarded
from discern.errors import DiscernError

VERBS = (
    "demo",
    "prepare",
    "pretrain",
    "adapt",
    "evaluate",
    "finetune",
    "predict",
    "embed",
    "export",
    "import",
    "detect",
    "score",
    "rerank",
    "fill",
    "serve",
    "watch",
    "report",
    "compare",
    "bench",
    "doctor",
    "config",
)
"""Verbs in the order of `discern --help`. Each is a function (or a `typer.Typer` for a group) in the module of its name."""


# Constants of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_BYTES, _OLD_LIMIT = -1, -3, 2**30, 2**25


def main() -> None:
    """Entry point of the command. Exits with the code of the verb."""
    _open_standard_streams()
    # A panic of the tokenizers library becomes an error message; its backtrace only helps with debugging.
    if "DISCERN_DEBUG" not in os.environ:
        os.environ["RUST_BACKTRACE"] = "0"
    _keep_the_heap()
    try:
        with _unbroken_words():
            code = application()(args=sys.argv[1:] or ["--help"], prog_name="discern", standalone_mode=False)
    except typer.TyperException as error:
        # Typer reads choices with pydantic, which begins its own messages so.
        print_error(error.format_message().replace(": Value error, ", ": ", 1), _help_for(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (DiscernError, OSError) as error:  # raised while the arguments were parsed, before the verb ran
        sys.exit(explained(error, Console(json_output=False)))
    sys.exit(code or 0)


def _open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams (`<&-`, `>&-`), as some services start programs.

    Otherwise the next file that is opened gets the number of the stream, and output is printed into that file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is that of the stream
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 (open until the process ends)


def _keep_the_heap() -> None:
    """Keep freed memory in the process.

    By default glibc returns large blocks to the kernel, and the next step waits until the kernel has cleared new ones, which
    takes a fifth of a training step. Nothing changes if the user has set either threshold by glibc's variables, or without glibc.
    """
    variables = os.environ.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
    if variables or any(f"malloc.{name}_threshold" in os.environ.get("GLIBC_TUNABLES", "") for name in ("mmap", "trim")):
        return
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        # Older versions refuse more than 32 MiB. The second setting alone would do harm: it disables the adaptive threshold.
        if library.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or library.mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT):
            library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def application() -> typer.Typer:
    """The command with all verbs. Their modules are cheap to import, because each verb imports what it needs when it runs."""
    app = typer.Typer(
        help="Train text encoders to tell real tokens from replaced ones.",
        epilog="Run 'discern demo' to see every stage in five minutes, and 'discern COMMAND --help' for the options of a "
        "command.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_options)
    for verb in VERBS:
        # The module of a verb that is a keyword of Python, such as `import`, has an underscore after its name.
        name = f"{verb}_" if iskeyword(verb) else verb
        entry = getattr(import_module(f"discern.cli.{name}"), name)
        if isinstance(entry, typer.Typer):
            for each in entry.registered_commands:
                each.short_help = _summary(each.callback)
            app.add_typer(entry, name=verb, short_help=entry.info.help)
        else:
            app.command(verb, short_help=_summary(entry))(guarded(entry))
    return app


@contextmanager
def _unbroken_words() -> Iterator[None]:
    """Wrap help only at spaces. By default, "--vocab-size" may be broken after its hyphen and cannot be copied."""
    usual = textwrap.TextWrapper.wordsep_re
    textwrap.TextWrapper.wordsep_re = textwrap.TextWrapper.wordsep_simple_re
    try:
        yield
    finally:
        textwrap.TextWrapper.wordsep_re = usual


def _summary(verb: Callable[..., object] | None) -> str:
    """The complete first sentence of the help of a verb, which the library would truncate."""
    text = " ".join((inspect.getdoc(verb) or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".") + "."


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"discern {discern.__version__}")
        raise typer.Exit
    return wanted


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Train text encoders to tell real tokens from replaced ones."""


def _help_for(error: typer.TyperException) -> str | None:
    """The help command for a command line with an error."""
    context = getattr(error, "ctx", None)
    return f"{context.command_path} --help" if context is not None else None
