"""Self-contained HTML pages: one stylesheet, and the page of a run, a fine-tuned model, a comparison or runs in progress.

A page fetches nothing and has no file beside it. `page.css` is the stylesheet of all pages, `page.html` the template of most.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from typing import Any, ClassVar, Literal

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from discern.report.charts import Chart, chart_svg

EntityOutcome = Literal["", "right", "missed", "invented", "confused"]


@dataclass(frozen=True)
class Piece:
    """A part of a text: a token that is shaded, words of one entity, or what is between them.

    Attributes:
        probability: probability that the token was replaced; None: not a token.
        token: index of the token in the text.
        outcome: whether the entity was found; "": not an entity.
        label: the label shown beside the entity: "PER", "PER missed", "PER invented", "PER, not LOC".
    """

    text: str
    probability: float | None = None
    token: int | None = field(default=None, compare=False)
    outcome: EntityOutcome = ""
    label: str = ""


def shaded_pieces(text: str, offsets: Sequence[tuple[int, int]], probabilities: Sequence[float]) -> list[Piece]:
    """The whole text, cut at its tokens. Where tokens share a character, as its bytes do, the highest probability counts.

    Args:
        offsets: (start, end) of each token in the text, in characters, in order.
        probabilities: for each token, the probability that it was replaced.
    """
    pieces: list[Piece] = []
    done = 0
    for number, ((start, end), probability) in enumerate(zip(offsets, probabilities, strict=True)):
        if end <= done:
            if pieces and start < end and (pieces[-1].probability or 0.0) < probability:
                pieces[-1] = Piece(pieces[-1].text, probability, number)
            continue
        if start > done:
            pieces.append(Piece(text[done:start]))
        pieces.append(Piece(text[max(start, done) : end], probability, number))
        done = end
    return [*pieces, Piece(text[done:])] if done < len(text) else pieces


_IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f]")


def entity_pieces(record: Mapping[str, Any]) -> list[Piece]:
    """The text of a mistake of a tagging task, cut at its entities. Of entities that overlap, the one that begins first is shown.

    Args:
        record: `words`, predicted `tags`, `gold` tags, and, where tags mark spans, `spans`, `missed` and `invented`, each a list
            of (start, end, kind) in words.
    """
    if "spans" in record:
        predicted, missed, invented = (
            {(start, end): kind for start, end, kind in record[key]} for key in ("spans", "missed", "invented")
        )
    else:  # tags of single words, such as parts of speech: correct ones are not shown
        tags = enumerate(zip(record["gold"], record["tags"], strict=True))
        wrong = {(position, position + 1): pair for position, pair in tags if pair[0] != pair[1]}
        missed = {span: gold for span, (gold, _) in wrong.items()}
        predicted = invented = {span: tag for span, (_, tag) in wrong.items()}
    words = [str(word) for word in record["words"]]
    # Chinese and Japanese have no spaces between words.
    spaced = [words[0]] + [
        word if _IDEOGRAPH.match(before[-1:]) or _IDEOGRAPH.match(word[:1]) else f" {word}" for before, word in pairwise(words)
    ]
    pieces: list[Piece] = []
    done = 0
    for start, end in sorted({*predicted, *missed}):
        if start < done:
            continue
        before, text = "".join(spaced[done:start]), "".join(spaced[start:end])
        if text.startswith(" "):
            before, text = f"{before} ", text[1:]
        tag, gold = predicted.get((start, end)), missed.get((start, end))
        if tag is None:
            entity = Piece(text, outcome="missed", label=f"{gold} missed")
        elif (start, end) not in invented:
            entity = Piece(text, outcome="right", label=tag)
        elif gold is None:
            entity = Piece(text, outcome="invented", label=f"{tag} invented")
        else:
            entity = Piece(text, outcome="confused", label=f"{tag}, not {gold}")
        pieces += [Piece(before), entity]
        done = end
    return [*pieces, Piece("".join(spaced[done:]))]


@dataclass(frozen=True)
class Texts:
    """Texts whose tokens are shaded, or whose entities are marked.

    Attributes:
        texts: each with a heading, or "".
        note: a paragraph below the texts, or "".
    """

    kind: ClassVar[str] = "texts"
    title: str
    texts: Sequence[tuple[str, Sequence[Piece]]]
    note: str = ""
    shaded: bool = True


# A number as the pages write it, possibly with its spread.
_NUMBER = re.compile(r"[-+\u2212]?\d[\d,]*(\.\d+)?(e\+\d+)?%?( \u00b1 \d[\d,]*(\.\d+)?)?")
Cell = str | float | None


@dataclass(frozen=True)
class Table:
    """A table of texts and numbers.

    Attributes:
        rows: as many cells as columns; None and "" are empty.
        note: a paragraph below the table, or "".
    """

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    @property
    def shown(self) -> dict[int, bool]:
        """Indices of the columns with any value; whether it is a column of numbers, which are right-aligned."""
        columns = [[cell for cell in cells if cell not in (None, "")] for cells in zip(*self.rows, strict=True)]
        return {
            index: all(not isinstance(cell, str) or _NUMBER.fullmatch(cell) for cell in cells)
            for index, cells in enumerate(columns)
            if cells
        }


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix: how often each label was predicted for each correct label.

    Attributes:
        rows: for each correct label, the counts of the predicted labels in the same order.
    """

    kind: ClassVar[str] = "confusion"
    title: str
    labels: Sequence[str]
    rows: Sequence[Sequence[int]]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The contents of a page. Empty parts are left out.

    Attributes:
        facts: (name, value) pairs for the head of the page.
        verdict: paragraphs at the top: what was trained and how good it is, then what it does well and what it does not.
        sections: tables and texts below the charts, in the order of the page; those without rows are left out.
        configuration: TOML, shown unchanged.
        notes: paragraphs on how to read the page.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    verdict: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    sections: Sequence[Table | Texts | Confusion] = ()
    configuration: str = ""
    notes: Sequence[str] = ()


def render_page(page: Page, template: str = "page.html", **values: Any) -> str:
    """The page as an HTML string. The same page gives the same string, and every text in it is escaped."""
    charts = [(f"chart-{n}", chart, chart_svg(chart, f"chart-{n}")) for n, chart in enumerate(page.charts, 1)]
    return render_template(template, page=page, charts=charts, **values)


def render_template(name: str, *, package: str = "discern.report", **values: object) -> str:
    """A template with its values, escaped, and with the skeleton and the stylesheet of all pages.

    Args:
        package: package of the template; what it includes may be in `discern.report`.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, ""), PackageLoader("discern.report", "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # What is between backticks as code; everything is escaped
    environment.filters["code"] = lambda text: Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    html = environment.get_template(name).render(**values)
    # Half a surrogate pair, as in a badly encoded argument, becomes "?".
    return html.encode("utf-8", "replace").decode("utf-8")


def package_text(name: str, package: str = "discern.report") -> str:
    """The text of a file of a package: a template, the stylesheet, a script."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def script_hash(script: str) -> str:
    """The hash by which the content security policy of a page allows its script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
