"""The generated parts of docs/reference, from the code: commands, settings, presets, the Python API, metrics, errors.

    python -m docs._sphinx.reference

rewrites the pages, which are committed. On a page, a generated part lies between `<!-- generated: NAME -->` and
`<!-- end of generated part -->`; everything else is written by hand.
"""

from __future__ import annotations

import inspect
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import torch
import typer
from docs._sphinx.metrics import METRICS
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import discern
from discern import errors
from discern.cli.main import application
from discern.cli.train import FIRST_PRESETS
from discern.compare.plan import CompareConfig
from discern.config.resolve import preset_names, preset_summary, usual_vocabulary
from discern.config.schema import NONE, expectation, flatten, keys_of, toml_value
from discern.data.batching.synthetic import SPECIAL
from discern.finetuning.settings import FilesConfig, FinetuneSection
from discern.model_files.run import build_objective
from discern.models import encoders
from discern.models.config import config_class
from discern.objectives import objectives
from discern.objectives.base import Vocabulary
from discern.registry import Registry
from discern.tasks import families, tasks
from discern.training.config import load_pretrain_config

REFERENCE = Path(__file__).parents[1] / "reference"
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated part -->)", flags=re.S)


def pages() -> dict[Path, str]:
    """Every page of the reference with its current text.

    Raises:
        KeyError: a page asks for a part that nothing generates.
    """
    parts = {"commands": _commands(), "python": _python(), "presets": _presets(), "errors": _errors()}
    parts |= {f"settings-{name}": "\n".join(_section(section)) for name, section in sections().items()}
    parts |= {f"metrics-{where}": _metrics(where) for where in ("log", "evaluation", "task")} | {"tasks": _tasks()}
    return {
        page: _PART.sub(lambda part: f"{part[1]}\n{parts[part[2]]}\n{part[3]}", page.read_text(encoding="utf-8"))
        for page in sorted(REFERENCE.glob("*.md"))
    }


# Markdown


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads))]
    lines += ["| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", " ".join(cell.split())) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """Inline code; nothing for nothing."""
    return f"`{text}`" if text else ""


def prose(text: str) -> str:
    """A sentence from the code as Markdown: 'words' are code, `[CLS]` is no link, `<doc>` no HTML and `*` no emphasis."""
    parts = re.sub(r"(?<!\w)'([\w.+-]+)'(?!\w)", r"`\1`", text).split("`")
    parts[::2] = [re.sub(r"([\[\]<>*_])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


# Commands


@dataclass(frozen=True)
class Verb:
    """One command.

    Attributes:
        name: as typed after `discern`: "config show".
        panel: heading of its group in `discern --help`; "" if there are no groups.
        declared: the command of typer.
        description: paragraphs of its help.
        examples: command lines.
    """

    name: str
    panel: str
    declared: Any
    description: list[str]
    examples: list[str]


@cache
def verbs() -> list[Verb]:
    """All commands, those of a group after one another, in the order of `discern --help`."""
    group: Any = typer.main.get_command(application())
    found = []
    for name, declared in group.commands.items():
        inside = getattr(declared, "commands", None)
        each = {f"{name} {verb}": inside[verb] for verb in inside} if inside else {name: declared}
        found += [_verb(verb, _panel(declared), command) for verb, command in each.items()]
    return found


def _verb(name: str, panel: str, declared: Any) -> Verb:
    paragraphs = [" ".join(each.split()) for each in inspect.cleandoc(declared.help or "").split("\n\n")]
    first = next((at for at, each in enumerate(paragraphs) if _is_example(each)), len(paragraphs))
    examples = [re.sub(r"^Examples?: ", "", each) for each in paragraphs[first:]]
    return Verb(name, panel, declared, paragraphs[:first], examples)


def _is_example(paragraph: str) -> bool:
    return re.match(r"Examples?: ", paragraph) is not None


def _panel(declared: Any) -> str:
    panel = getattr(declared, "rich_help_panel", None)
    return panel if isinstance(panel, str) else ""


def _commands() -> str:
    """The list of commands by group, then a section for each."""
    by_panel: dict[str, list[Verb]] = defaultdict(list)
    for verb in verbs():
        by_panel[verb.panel].append(verb)
    said = []
    for panel, group in by_panel.items():
        rows = [
            (f"[`discern {verb.name}`](#discern-{verb.name.replace(' ', '-')})", prose(verb.description[0])) for verb in group
        ]
        said += [f"**{panel}**\n"] if panel else []
        said.append(table(["command", "what it does"], rows))
    return "\n".join([*said, *(line for verb in verbs() for line in _command(verb))])


def _command(verb: Verb) -> Iterator[str]:
    context = verb.declared.make_context(f"discern {verb.name}", [], resilient_parsing=True)
    yield f"## discern {verb.name}\n"
    yield from (f"{prose(paragraph)}\n" for paragraph in verb.description)
    # With one pair of brackets and one ellipsis: `{SOURCE...}...` becomes `SOURCE...`.
    usage = " ".join(verb.declared.get_usage(context).split()).removeprefix("Usage: ")
    usage = re.sub(r"\{([^{}]+)\}", r"\1", usage).replace("[[", "[").replace("]]", "]")
    usage = re.sub(r"(\.\.\.|\])\.\.\.", r"\1", usage)
    yield "```text\n" + "\n".join([usage, *verb.examples]) + "\n```\n"
    parameters = [each for each in verb.declared.params if not getattr(each, "hidden", False)]
    if arguments := [each for each in parameters if not each.opts[0].startswith("-")]:
        rows = [(code(str(each.metavar or each.make_metavar(context))), prose(each.help or "")) for each in arguments]
        yield table(["argument", "meaning"], rows)
    by_panel: dict[str, list[Any]] = defaultdict(list)
    for each in parameters:
        if each not in arguments:
            by_panel[_panel(each)].append(each)
    for panel, options in by_panel.items():
        rows = [(_option_names(each, context), prose(each.help or ""), _option_default(each)) for each in options]
        yield from [f"**{panel}**\n"] if panel else []
        yield table(["option", "meaning", "default"], rows)


def _option_names(option: Any, context: Any) -> str:
    """The names of an option, with its value: `--out DIR`."""
    record = option.get_help_record(context)
    names = record[0] if record else ", ".join(option.opts)
    names = names.replace("<float range>", "NUMBER").replace("<int range>", "N")
    return ", ".join(code(" ".join(each.split())) for each in re.split(r", (?=-)", names))


def _option_default(option: Any) -> str:
    value, shown = option.default, getattr(option, "show_default", True)
    if callable(value) or value in (None, False, (), []) or not shown:
        return ""
    return code("yes" if value is True else str(value))


# Settings

_Variants = Mapping[str, type[BaseModel]]


@dataclass(frozen=True)
class Section:
    """One section of a configuration.

    Attributes:
        name: "train", as in `[train]`; "" for keys without a section.
        variants: the models by the name of the encoder, objective or family of tasks that has them; "" if there is one.
        kind: what the names of the variants name.
    """

    name: str
    variants: _Variants
    kind: str = ""


@cache
def sections() -> dict[str, Section]:
    """The sections by the names of their parts of the page."""

    def registered(registry: Registry[Any]) -> _Variants:
        return {name: registry.load(name).Config for name in registry.names()}

    def of_pretraining(name: str) -> Section:
        return Section(name, {"": type(getattr(_resolved_presets()["tiny"], name))})

    return {
        "data": of_pretraining("data"),
        "model": Section("model", {name: config_class(name) for name in encoders.names()}, "encoder"),
        "objective": Section("objective", registered(objectives), "objective"),
        "optimizer": of_pretraining("optimizer"),
        "train": of_pretraining("train"),
        "finetune": Section("finetune", {"": FinetuneSection}),
        "files": Section("files", {"": FilesConfig}),
        "task": Section("task", registered(families), "family of tasks"),
        "compare": Section("", {"": CompareConfig}),
    }


@cache
def _resolved_presets() -> dict[str, Any]:
    return {name: load_pretrain_config(None, name).config for name in preset_names()}


def _section(section: Section) -> Iterator[str]:
    """Every key of a section, with those that only some variants have."""
    fields: dict[str, dict[str, FieldInfo]] = defaultdict(dict)
    for variant, model in section.variants.items():
        for name, field in keys_of(model)[1].items():
            if "." not in name:
                fields[name][variant] = field
    for name, of_variants in fields.items():
        key = f"{section.name}.{name}" if section.name else name
        described = _by_variant(of_variants, lambda field: prose(field.description or ""))
        facts = [f"Type: {_in_words(of_variants, lambda field: prose(expectation(field)))}."]
        facts.append(f"Default: {_in_words(of_variants, _default)}.")
        if len(of_variants) < len(section.variants):
            facts.append(f"Only for the {section.kind} {', '.join(code(variant) for variant in of_variants)}.")
        facts += [f"Presets: {other}."] if (other := _preset_values(section.name, name)) else []
        yield f"### `{key}`\n"
        if len(described) == 1:
            yield next(iter(described)) + "\n"
        else:
            lines = (f"- {', '.join(code(name) for name in names)}: {text}" for text, names in described.items())
            yield "\n".join(lines) + "\n"
        yield "\n".join(f"- {fact}" for fact in facts) + "\n"


def _in_words(fields: Mapping[str, FieldInfo], show: Callable[[FieldInfo], str]) -> str:
    """What `show` says of a field, or of each variant where that differs."""
    shown = _by_variant(fields, show)
    if len(shown) == 1:
        return next(iter(shown))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in shown.items())


def _by_variant(fields: Mapping[str, FieldInfo], show: Callable[[FieldInfo], str]) -> dict[str, list[str]]:
    """The variants by what `show` says of their field."""
    found: dict[str, list[str]] = defaultdict(list)
    for variant, field in fields.items():
        found[show(field)].append(variant)
    return found


def _default(field: FieldInfo) -> str:
    return (
        "none, it is required" if field.is_required() else _value(field.get_default(call_default_factory=True, validated_data={}))
    )


def _value(value: Any) -> str:
    if value is None:
        return code(NONE)
    if isinstance(value, BaseModel):
        return "see its keys"
    text = str(value) if isinstance(value, dict) else toml_value(value)
    return code(text) if len(text) <= 60 else "a schedule"


def _preset_values(section: str, name: str) -> str:
    """The values that presets give a key of pre-training, where they are not its default."""
    by_value: dict[str, list[str]] = defaultdict(list)
    for preset, config in _resolved_presets().items():
        values = flatten(config)
        if (key := f"{section}.{name}") in values:
            field = type(getattr(config, section)).model_fields[name]
            if not field.is_required() and (shown := _value(values[key])) != _default(field):
                by_value[shown].append(preset)
    return "; ".join(f"{value} in {', '.join(names)}" for value, names in by_value.items())


def _presets() -> str:
    """The presets to start with and the others, with their sizes."""
    heads = ("preset", "what it is", "objective", "encoder", "parameters", "vocabulary", "length", "steps of sequences")
    others = [name for name in preset_names() if name not in FIRST_PRESETS]
    return "\n".join(
        [
            "## To start with\n",
            table(heads, map(_preset, FIRST_PRESETS)),
            "## To repeat papers, and for tests\n",
            table(heads, map(_preset, others)),
        ]
    )


def _preset(name: str) -> list[str]:
    config = _resolved_presets()[name]
    model, train, vocabulary = config.model, config.train, usual_vocabulary(name)
    with torch.device("meta"):  # parameters are counted without memory for them, shared ones once
        objective = build_objective(config, Vocabulary(vocabulary, SPECIAL))
    return [
        code(name),
        prose(preset_summary(name)),
        code(config.objective.name),
        f"{model.encoder}, {model.num_layers} x {model.hidden_size}",
        f"{sum(parameter.numel() for parameter in objective.parameters()) / 1e6:.1f} M",
        f"{vocabulary:,}",
        f"{config.data.sequence_length}",
        f"{train.max_steps:,} of {train.sequences_per_step}",
    ]


# Python


def _python() -> str:
    """Signature and docstring of every public name; the errors have a page of their own."""
    public = {name: getattr(discern, name) for name in discern.__all__ if not name.startswith("_")}
    public = {name: getattr(each, "verb", each) for name, each in public.items()}  # of a package that can be called
    classes = {name: each for name, each in public.items() if inspect.isclass(each) and not issubclass(each, Exception)}
    said = ["## Functions\n"]
    for name, each in public.items():
        if inspect.isfunction(each):
            said += [f"### discern.{name}\n", *_function(f"discern.{name}", each)]
            verb = name.removesuffix("_model").replace("_", " ")
            if verb in {verb.name for verb in verbs()}:
                said.append(f"The command is [`discern {verb}`](commands.md#discern-{verb.replace(' ', '-')}).\n")
    said.append("## Classes\n")
    for name, each in classes.items():
        made_by_users = "\nArgs:\n" in (each.__doc__ or "")
        said += [f"### discern.{name}\n", *(_function(f"discern.{name}", each) if made_by_users else _docstring(each))]
        for member, value in _members(each):
            if isinstance(value, property):
                said += [f"#### {name}.{member}\n", *_docstring(value)]
            else:
                said += [f"#### {name}.{member}()\n", *_function(f"{name}.{member}", value)]
    return "\n".join(said)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties with a docstring that our classes define, in the order of their source."""
    seen: set[str] = set()
    for base in inspect.getmro(kind):
        for name, value in vars(base).items() if base.__module__.startswith("discern") else ():
            value = property(value.func) if type(value).__name__ == "cached_property" else value
            value = getattr(value, "__func__", value)
            documented = (inspect.isfunction(value) or isinstance(value, property)) and value.__doc__
            if documented and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, value


def _function(name: str, function: Any) -> Iterator[str]:
    signature = inspect.signature(function)
    annotations = {each.name: each.annotation for each in signature.parameters.values()} | {"return": signature.return_annotation}
    if any("Annotated[" in str(each) for each in annotations.values()):  # keep the type, without the help of the option
        annotations = {each: inspect.formatannotation(kind) for each, kind in get_type_hints(function).items()}
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    words: list[str] = []
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        default = "" if each.default is each.empty else f" = {each.default!r}"
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        words.append(f"{stars}{each.name}: {_type(annotations.get(each.name))}{default}".replace(": =", " ="))
    result = f" -> {kind}" if (kind := _type(annotations.get("return"))) else ""
    line = f"{name}({', '.join(words)}){result}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){result}"
    yield f"```python\n{line}\n```\n"
    yield from _docstring(function)


def _type(annotation: Any) -> str:
    """A type as one writes it, without the modules."""
    if annotation in (None, inspect.Signature.empty):
        return "" if annotation is not None else "None"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text).strip("'")


def _docstring(value: Any) -> Iterator[str]:
    """A docstring in Markdown: paragraphs, and lists of arguments, attributes and errors."""
    text = re.sub(r"^(Args|Attributes|Returns|Yields|Raises):\n", r"\n\1:\n\n", inspect.getdoc(value) or "", flags=re.M)
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if re.fullmatch(r"(Args|Attributes|Returns|Yields|Raises):", paragraph.strip()):
            yield f"**{paragraph.strip()[:-1]}**\n".replace("Args", "Parameters")
        elif items := re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8,}.*)*)", paragraph, flags=re.M):
            yield "\n".join(f"- `{name}`: {prose(' '.join(meaning.split()))}" for name, meaning in items) + "\n"
        elif paragraph.startswith((">>>", "    >>>")):
            yield f"```python\n{inspect.cleandoc(paragraph)}\n```\n"
        elif not _is_example(paragraph) and not paragraph.startswith("discern "):
            yield prose(" ".join(paragraph.split())) + "\n"


# Tables


def _metrics(where: str) -> str:
    chosen = [each for each in METRICS if each.where == where]
    rows = [(code(each.name), prose(each.meaning), each.unit, each.range, prose(each.usual)) for each in chosen]
    return table(("metric", "what it is", "unit", "range", "usual"), rows)


def _errors() -> str:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.DiscernError)]
    rows = [
        (code(f"discern.errors.{each.__name__}"), prose((each.__doc__ or "").split("\n")[0]), str(each.exit_code))
        for each in kinds
    ]
    return table(("class", "meaning", "exit code"), rows)


def _tasks() -> str:
    loaded = {name: tasks.load(name) for name in tasks.names()}
    rows = [(code(name), task.family.family, ", ".join(map(code, task.metrics))) for name, task in loaded.items()]
    return table(("task", "family", "metrics, the headline first"), rows)


def main() -> None:
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")


# The help of the commands is laid out for a page, whatever terminal this runs in.
os.environ["COLUMNS"] = "100"

if __name__ == "__main__":
    main()
