"""Render Markdown from templates. Whatever a template prints is escaped to plain text, as labels, names and remarks are
untrusted; only `Markup`, which the filters `code`, `cell` and `quoted` return, is printed unchanged.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

UNKNOWN = "not recorded"

# Line breaks, control characters, and characters that reorder text: browsers and terminals display cards.
_LAYOUT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_INVISIBLE = re.compile("[\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKUP = re.compile(r"([\\`*\[\]{}~]|(?<!\w)_|_(?!\w))")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def render(template: str, **values: Any) -> str:
    """Render a template of this package, for example 'model.md.j2'."""
    return _environment().get_template(template).render(values)


def escaped(value: object) -> str:
    """Text for running Markdown, on one line, that cannot form a link, emphasis or HTML."""
    text = _plain(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", text)


def code(value: object) -> str:
    """Text as a code span, even if it contains backticks."""
    text = _plain(value)
    if not text.strip():
        return "(empty)"
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def cell(value: object) -> str:
    """Text, or Markdown if it is `Markup`, for a cell of a table: on one line, with every bar escaped."""
    return _LAYOUT.sub(" ", _markdown(value)).replace("|", "\\|")


def quoted(card: str) -> str:
    """Third-party Markdown as a quotation, without its front matter; HTML in it is shown, not interpreted."""
    body = card.strip()
    if body.startswith("---\n") and (end := body.find("\n---", 3)) > 0:
        body = body[end + 4 :].strip()
    lines, fence = [], ""
    for line in body.splitlines():
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        elif not fence:
            line = line.replace("<", "&lt;")
        lines.append(f"> {_INVISIBLE.sub('', _LAYOUT.sub(' ', line))}".rstrip())
    return "\n".join(lines)


@functools.cache
def _environment() -> Environment:
    # Jinja would escape everything except `Markup` to HTML; `_markdown` converts all values to `Markup` first.
    environment = Environment(
        loader=PackageLoader("discern.convert", "cards"),
        autoescape=True,
        finalize=_markup,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for name, make in {"code": code, "cell": cell, "quoted": quoted}.items():
        environment.filters[name] = functools.partial(_call, make)
    environment.filters |= {"known": _known, "number": _number, "setting": _setting}
    return environment


def _plain(value: object) -> str:
    return _INVISIBLE.sub("\ufffd", _LAYOUT.sub(" ", str(value)))


def _markdown(value: object) -> str:
    return str(value) if isinstance(value, Markup) else escaped(value)


def _markup(value: object) -> Markup:
    return Markup(_markdown(value))


def _call(make: Callable[[Any], str], value: object) -> Markup:
    return Markup(make(value))


def _known(value: object) -> object:
    return UNKNOWN if value in (None, "") else value


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else UNKNOWN


def _setting(value: object) -> object:
    return UNKNOWN if value is None else f"{value:g}" if isinstance(value, float) else value
