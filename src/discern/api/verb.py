"""How a verb is defined: a typed function whose annotations also describe its arguments and options on the command line."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic import ConfigDict, ValidationError, validate_call
from rich.console import Console

from discern.cli.progress import Display
from discern.config.resolve import preset_names
from discern.config.schema import toml_value
from discern.errors import ConfigError, DiscernError
from discern.progress import Progress, warning_to

P = ParamSpec("P")
R = TypeVar("R")
Group = Literal["Train", "Use", "Compare and diagnose"]

_SECTION = re.compile(r"^(?:Args|Returns|Raises):$", re.MULTILINE)
ADVANCED = "Advanced"
"""Heading of the options that a first use does not need."""


@dataclass(frozen=True)
class Verb:
    """A verb as the command line needs it.

    Attributes:
        function: the function, without the checks of a call from Python.
        signature: its parameters, with evaluated annotations.
        group: heading in the help.
        trains: whether it may be one of several processes, of which the first prints.
        has_nproc: whether `--nproc` starts it in several processes.
    """

    function: Callable[..., Any]
    signature: inspect.Signature
    group: Group
    trains: bool
    has_nproc: bool

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """Type and description of each parameter that the command line has, by name."""
        parameters = self.signature.parameters.values()
        return {each.name: get_args(each.annotation)[:2] for each in parameters if get_origin(each.annotation) is Annotated}

    @property
    def help(self) -> str:
        """What the command does, with examples."""
        return _SECTION.split(inspect.getdoc(self.function) or "")[0].rstrip()

    @property
    def python_help(self) -> str:
        """The docstring of the function, completed by its arguments."""
        text = inspect.getdoc(self.function) or ""
        arguments = [f"    {name}: {in_python(info.help)}" for name, (_, info) in self.options.items()]
        heading = ["", "Args:"] if arguments else []
        return "\n".join([in_python(self.help), *heading, *arguments, "", text[len(self.help) :].lstrip()])


VERBS: dict[str, Verb] = {}
"""The verbs that were defined so far, by name, in the order of the help."""


def verb(
    group: Group, *, name: str | None = None, trains: bool = False, nproc: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Define a verb. Parameters whose annotations carry `argument`, `option` or `advanced` are those of the command line.

    A call from Python checks its arguments by their annotations, and its errors name parameters instead of options.
    """

    def define(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function, eval_str=True)
        made = VERBS[name or function.__name__] = Verb(function, signature, group, trains or nproc, nproc)
        checked: Callable[[], Callable[..., R]] = cache(
            lambda: validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)
        )

        public = [each for each in signature.parameters.values() if each.name not in ("check_only", "processes")]  # for `--nproc`
        bare = get_type_hints(function)
        plain = signature.replace(parameters=[each.replace(annotation=bare[each.name]) for each in public])

        @wraps(function)
        def from_python(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given = plain.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}(): {error}") from None
            with python_errors():
                for each, (_, info) in made.options.items():
                    low, high, value = info.min, info.max, given.get(each)
                    if isinstance(value, int | float) and not ((low is None or value >= low) and (high is None or value <= high)):
                        raise ConfigError(f"{each} is {value}, expected {low} to {high}".replace(" to None", " or more"))
                try:
                    return checked()(**given)
                except ValidationError as error:
                    if error.title != function.__name__:
                        raise
                    problem = error.errors()[0]
                    expected = problem["msg"].removeprefix("Input should be ")
                    raise ConfigError(f"{problem['loc'][0]} is {problem['input']!r}, expected {expected}") from None

        from_python.__signature__ = plain  # type: ignore[attr-defined]
        from_python.__doc__ = made.python_help
        return from_python

    return define


def argument(metavar: str, help: str) -> Any:
    """A positional argument of the command line."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def option(help: str, metavar: str | None = None, *names: str, **details: Any) -> Any:
    """An option of the command line, named like the parameter.

    Args:
        metavar: how the help calls the value; None: by its type.
        names: other names than that of the parameter.
        details: passed to `typer.Option`, such as `min`.
    """
    return typer.Option(*names, metavar=metavar, help=help, **details)


def advanced(help: str, metavar: str | None = None, *names: str, **details: Any) -> Any:
    """An option that the help lists under a heading of its own."""
    return option(help, metavar, *names, rich_help_panel=ADVANCED, **details)


PathLike: TypeAlias = str | Path
Paths: TypeAlias = PathLike | Sequence[PathLike]
Names: TypeAlias = str | Sequence[str]
FOREIGN = "a Hugging Face ELECTRA, BERT, XLNet, ModernBERT or DeBERTa (folder or name on the Hub)"
Settings: TypeAlias = Annotated[
    Mapping[str, Any] | Sequence[str] | None,
    option("Set a value; overrides preset and file. May be repeated.", "SECTION.KEY=VALUE", "--set"),
]
Preset: TypeAlias = Annotated[
    str | None,
    option(
        "Preset to start from; 'discern config presets' lists them.",
        "NAME",
        autocompletion=preset_names,
    ),
]
ConfigFile: TypeAlias = Annotated[
    PathLike | None,
    argument("CONFIG.toml", "Configuration file, which overrides the preset; or the folder of a run, to use its configuration."),
]
Device: TypeAlias = Annotated[str, advanced("Device to use: auto, cpu, cuda, cuda:1, mps.", "NAME")]
Precision: TypeAlias = Annotated[Literal["float32", "bfloat16"], advanced("Floating-point type to compute in.")]
Listener: TypeAlias = Progress | None
"""Receives progress; None: lines go to the logger `discern`, and a notebook shows bars."""


class Logged(Display):
    """A listener for library use. Lines go to the logger `discern`; bars are shown in notebooks only."""

    def __init__(self) -> None:
        super().__init__(Console(force_terminal=False))

    def note(self, message: str) -> None:
        warns = message.startswith("warning: ")
        message = in_python(message.removeprefix("warning: "))
        logging.getLogger("discern").log(logging.WARNING if warns else logging.INFO, "%s", message)


def listening(progress: Listener) -> tuple[Progress, Callable[[str], None]]:
    """The listener of a call, and a function that prints warnings through it."""
    listener = progress or Logged()
    return listener, warning_to(listener)


# Commands, which work for everybody; a setting with its value; any other option, perhaps with the name of its value.
_SPOKEN = re.compile(
    r"(?P<command>`[^`]*`|\b(?:discern|hf|pip) [a-z]+ [^;,`\n]*)"
    r"|--set (?P<quote>'?)(?P<key>[\w.]+)=(?P<value>'[^']*'|\[[^'\n]*\]|[^\s,;)']+)(?P=quote)"
    r"|--(?P<option>[a-z][a-z-]*)(?P<of> [A-Z]+\b)?"
)
_LITERAL = re.compile(r"[-\d.]+(e-?\d+)?|True|False|[A-Z]+|\W.*")


def in_python(message: str, names: Mapping[str, str] | None = None) -> str:
    """A message about options of the command line, such as `--set` and `--dev FILE`, for callers of a Python function.

    Args:
        names: parameters that are called differently than the options, by option.
    """

    def spoken(found: re.Match[str]) -> str:
        if found["command"]:
            return found["command"]
        if key := found["key"]:
            value = {"true": "True", "false": "False"}.get(found["value"], found["value"])
            return f'settings={{"{key}": ' + (value if _LITERAL.fullmatch(value) else f'"{value}"') + "}"
        option = {"set": "settings", "as": "as_", "push": "push_to_hub", "for": "for_", "lambda": "lambda_", **(names or {})}.get(
            found["option"], found["option"].replace("-", "_")
        )
        return option + (found["of"] or "").replace(" ", "=")

    return _SPOKEN.sub(spoken, message)


@contextmanager
def python_errors(translate: Callable[[str], str] = in_python) -> Iterator[None]:
    """Name the options of the command line in errors as the parameters of the function.

    Args:
        translate: rewrites a message about options.
    """
    try:
        yield
    except DiscernError as error:
        error.message = translate(error.message)
        error.hint = error.hint and translate(error.hint)
        error.args = (error.message,)
        raise


def overrides_of(settings: Mapping[str, Any] | Sequence[str] | None) -> tuple[str, ...]:
    """Settings as on the command line, "KEY=VALUE" with values in TOML syntax.

    Args:
        settings: by dotted key, `{"train.max_steps": 1000}`, or nested, `{"train": {"max_steps": 1000}}`; or in that form.

    Raises:
        ConfigError: a value has no representation in TOML.
    """
    if not isinstance(settings, Mapping):
        return tuple(settings or ())
    overrides: list[str] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            overrides += [f"{key}.{override}" for override in overrides_of(value)] or [f"{key}={{}}"]
            continue
        try:
            overrides.append(f"{key}={toml_value(value.item() if hasattr(value, 'item') else value)}")
        except TypeError:
            raise ConfigError(
                f"{key} is of the type {type(value).__name__}, expected a string, a number, True, False or a list of these",
                hint="leave it out for its default",
            ) from None
    return tuple(overrides)


def listed(given: Any) -> list[Any]:
    """One value, several or None, as a list."""
    return [given] if isinstance(given, str | Path) else list(given or ())


def model_folder(model: PathLike, listener: Progress) -> Path:
    """The folder of a model, which is downloaded if it is given by its name on the Hugging Face Hub."""
    from discern.model_files.hub import local_model

    return local_model(model, listener.note)


def path_of(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)


def refuse_together(option: str, others: Mapping[str, bool]) -> None:
    """Raise a ConfigError for options that were given although they have no effect with another one.

    Args:
        others: whether each of these options was given.
    """
    given = " and ".join(name for name, is_given in others.items() if is_given)
    if given:
        raise ConfigError(f"{given} cannot be combined with {option}", hint=f"leave out {given}")


def checked_input(source: PathLike, what: str) -> Path:
    """A file of texts that the user named, or `-` for standard input.

    Raises:
        ConfigError: it is a sentence instead of a file, or nothing is piped in.
    """
    path = Path(source)
    if str(path) == "-" and sys.stdin.isatty():
        raise ConfigError(f"there are no {what}", hint="name a file, or pipe them in, one per line")
    if " " in str(path).strip() and not path.exists():
        raise ConfigError(
            f"there is no file '{path}'", hint=f'a text itself is given by --text "{path}", where the command has it'
        )
    return path


def checked_text(text: str, name: str) -> str:
    """A text that the user typed, checked to be UTF-8, because a shell passes bytes.

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
