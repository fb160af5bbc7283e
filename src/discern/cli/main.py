"""The command `discern`: its verbs, its version, and how it answers to a command line it does not understand."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from keyword import iskeyword
from typing import Annotated

import typer

import discern
from discern.cli.console import INTERRUPTED, Console, explained, print_error
from discern.cli.outputs import guarded
from discern.errors import DiscernError
from discern.training.place import follow_launcher

VERBS = (
    "demo",
    "prepare",
    "pretrain",
    "adapt",
    "evaluate",
    "finetune",
    "predict",
    "export",
    "import",
    "detect",
    "score",
    "rerank",
    "fill",
    "report",
    "compare",
    "bench",
    "doctor",
    "config",
)
"""In the order of `discern --help`. Each is a function (or, for a group, a `typer.Typer`) in the module of its name."""


# Of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_BYTES, _OLD_LIMIT = -1, -3, 2**30, 2**25


def main() -> None:
    """Entry point of the command; leaves with its exit code."""
    _open_standard_streams()
    # A panic of the tokenizers library is told in our words; its backtrace helps nobody but who debugs.
    if "DISCERN_DEBUG" not in os.environ:
        os.environ["RUST_BACKTRACE"] = "0"
    # Read by OpenMP when torch is loaded. By default a thread that waits for another spins for milliseconds; where other
    # programs want the cores too, that made training of small networks several times slower.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    _keep_the_heap()
    follow_launcher()
    try:
        with _unbroken_words():
            code = application()(args=sys.argv[1:] or ["--help"], prog_name="discern", standalone_mode=False)
    except typer.TyperException as error:
        print_error(error.format_message(), _help_for(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (DiscernError, OSError) as error:  # while the arguments were looked at, before the verb's own frame
        sys.exit(explained(error, Console(json_output=False)))
    sys.exit(code or 0)


def _open_standard_streams() -> None:
    """Put /dev/null where a standard stream is closed (`<&-`, `>&-`), as services start programs.

    Otherwise the next file that is opened gets the stream's number, and what is printed goes into that file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 (lives as long as we do)


def _keep_the_heap() -> None:
    """Let freed memory stay with the process.

    By default glibc hands large blocks back at every free, and the next step waits while the kernel clears them again: a
    fifth of a training step. Left alone where the user has set glibc's own variables, and where there is no glibc.
    """
    if any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        # Older ones refuse more than 32 MiB. The second setting alone would make matters worse: it ends the adaptive threshold.
        if library.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or library.mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT):
            library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def application() -> typer.Typer:
    """The verbs that exist. Their modules are cheap to import: the work is imported when it is asked for."""
    app = typer.Typer(
        help="Train text encoders to tell real tokens from replaced ones.",
        epilog="discern VERB --help tells more of each.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_options)
    for verb in VERBS:
        # A verb that Python has a use for itself, as `import`, stands in a module with an underscore behind its name.
        name = f"{verb}_" if iskeyword(verb) else verb
        if find_spec(f"discern.cli.{name}") is None:
            continue
        entry = getattr(import_module(f"discern.cli.{name}"), name)
        if isinstance(entry, typer.Typer):
            for each in entry.registered_commands:
                each.short_help = _summary(each.callback)
            app.add_typer(entry, name=verb, short_help=_summary_of(entry))
        else:
            app.command(verb, short_help=_summary(entry))(guarded(entry))
    return app


@contextmanager
def _unbroken_words() -> Iterator[None]:
    """Have help break lines at blanks alone. By default "--vocab-size" is broken after its hyphen, and cannot be copied."""
    usual = textwrap.TextWrapper.wordsep_re
    textwrap.TextWrapper.wordsep_re = textwrap.TextWrapper.wordsep_simple_re
    try:
        yield
    finally:
        textwrap.TextWrapper.wordsep_re = usual


def _summary_of(group: typer.Typer) -> str:
    """The help of a group, whole."""
    return str(group.info.help or "").strip().partition("\n\n")[0]


def _summary(verb: Callable[..., object] | None) -> str:
    """The first sentence of a verb's help, whole: left to itself the library cuts it."""
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
    """The command that explains the one that was mistyped."""
    context = getattr(error, "ctx", None)
    return f"{context.command_path} --help" if context is not None else None
