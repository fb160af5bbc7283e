"""The command `discern`: verbs made from the functions of `discern.api`, and errors in the command line."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

import discern
from discern.api import diagnose, serving, train, use  # noqa: F401 (they define the verbs)
from discern.api.verb import ADVANCED, VERBS, Verb, advanced
from discern.cli.console import INTERRUPTED, Console, command, explained, print_error
from discern.errors import DiscernError
from discern.training.process import rank_environment

_GROUPS = {"Train": "discern.cli.train", "Use": "discern.cli.use", "Compare and diagnose": "discern.cli.diagnose"}
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
_Nproc = Annotated[int, advanced("Number of processes to start on this machine, usually one per GPU.", "N", min=1)]
_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

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
        context = getattr(error, "ctx", None)
        # Typer reads choices with pydantic, which begins its own messages so.
        message = error.format_message().replace(": Value error, ", ": ", 1)
        print_error(message, f"{context.command_path} --help" if context is not None else None)
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


class _Command(TyperCommand):
    """A verb whose help lists the options of a first use apart from the advanced ones, without types of Python."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {"Arguments": [], "Options": [], ADVANCED: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if parameter.param_type_name == "argument" and record:
                sections["Arguments"].append((parameter.metavar, record[1]))
            elif record:
                sections[getattr(parameter, "rich_help_panel", None) or "Options"].append(record)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class _Group(TyperGroup):
    """The commands in the order of their definition, under the headings of their groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        headings: dict[str, list[Any]] = {heading: [] for heading in ("Commands", *_GROUPS)}
        for name in self.list_commands(ctx):
            found: Any = self.get_command(ctx, name)
            headings[found.rich_help_panel].append((name, found.short_help))
        for heading, rows in headings.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def application() -> typer.Typer:
    """The command with all verbs. They are cheap to define, because each imports what it needs when it runs."""
    plain: dict[str, Any] = {"rich_markup_mode": None, "context_settings": _HELP}
    app = typer.Typer(
        help="Pre-train your own text encoder on the hardware you have, fine-tune it, and use it: ELECTRA and its family.",
        epilog="Run 'discern demo' to see every stage in five minutes, and 'discern COMMAND --help' for the options of a "
        "command.",
        cls=_Group,
        pretty_exceptions_enable=False,
        **plain,
    )
    app.callback()(_options)
    config = typer.Typer(help="Show, check and compare configurations.", cls=_Group, **plain)
    for name, verb in sorted(VERBS.items(), key=lambda each: list(_GROUPS).index(each[1].group)):
        group, _, last = name.rpartition(" ")
        # The complete first sentence, which the library would truncate.
        summary = " ".join(verb.help.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."
        place, panel = (config, "Commands") if group else (app, verb.group)
        place.command(last, cls=_Command, help=verb.help, short_help=summary, rich_help_panel=panel)(_callback(verb))
    app.add_typer(config, name="config", short_help=config.info.help, rich_help_panel="Train")
    return app


def _callback(verb: Verb) -> Callable[..., None]:
    """What runs a verb: calls its function, and prints the result by the function of the same name in `discern.cli`."""
    accepted = verb.signature.parameters

    def run(*, json_output: bool, nproc: int = 1, **options: Any) -> None:
        with command(json_output=json_output, trains=verb.trains) as console:
            printing = import_module(_GROUPS[verb.group])
            printer = getattr(printing, f"{verb.function.__name__}_results", None)
            given = {"progress": console.progress, "processes": nproc, "on_result": printer and printer(console, options)}
            options |= {each: value for each, value in given.items() if each in accepted}
            # Each of the processes has the same command line, and knows by its environment that it is one of several.
            if nproc > 1 and rank_environment().world_size == 1 and not options.get("dry_run"):
                from discern.cli.ranks import launch_ranks

                if "check_only" in accepted:
                    verb.function(**options, check_only=True)
                launch_ranks(nproc)
            if result := verb.function(**options):
                getattr(printing, verb.function.__name__)(console, result, options)

    parameters = [
        inspect.Parameter(
            each,
            inspect.Parameter.KEYWORD_ONLY,
            default=accepted[each].default,
            annotation=Annotated[_on_the_command_line(kind), _named(each, kind, info, accepted[each].default)],
        )
        for each, (kind, info) in verb.options.items()
    ]
    added = {"json_output": (False, _Json)} | ({"nproc": (1, _Nproc)} if verb.has_nproc else {})
    parameters += [
        inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for each, (default, kind) in added.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _on_the_command_line(kind: Any) -> Any:
    """The type by which the command line reads a parameter: paths as `Path`, one value or several as a list, settings as text."""
    kinds = [each for each in get_args(kind) if each is not NoneType] if get_origin(kind) in (Union, UnionType) else [kind]
    element = Path if Path in kinds else str if str in kinds else kinds[0]
    if any(isinstance(get_origin(each), type) and issubclass(get_origin(each), Sequence | Mapping) for each in kinds):
        element = list[str]  # not paths, which would shorten the two slashes of an address
    return element | None if NoneType in get_args(kind) or element in (Path, str) else element


def _named(name: str, kind: Any, info: Any, default: object) -> Any:
    """The description of a parameter, in which an option has its name. A flag that is False by default has no opposite."""
    info = copy(info)
    if isinstance(info, typer.models.OptionInfo) and info.default is ...:
        flag = name.rstrip("_").replace("_", "-")
        info.default = f"--{flag}/--no-{flag}" if bool in (kind, *get_args(kind)) and default is not False else f"--{flag}"
    return info


@contextmanager
def _unbroken_words() -> Iterator[None]:
    """Wrap help only at spaces. By default, "--vocab-size" may be broken after its hyphen and cannot be copied."""
    usual = textwrap.TextWrapper.wordsep_re
    textwrap.TextWrapper.wordsep_re = textwrap.TextWrapper.wordsep_simple_re
    try:
        yield
    finally:
        textwrap.TextWrapper.wordsep_re = usual


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
    """Pre-train your own text encoder."""
