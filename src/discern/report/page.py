"""Self-contained HTML pages: one stylesheet, and the page of a run, a fine-tuned model or a comparison.

A page fetches nothing and has no file beside it. `page.css` is the stylesheet of all pages, `page.html` the template of most.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from discern.report.charts import Chart, chart_svg
from discern.report.curves import HeldOutMetric
from discern.report.predictions import Confusion


@dataclass(frozen=True)
class ShadingColors:
    """Colors of a text whose tokens are shaded, in red, green and blue from 0 to 255.

    Attributes:
        card: background of the text.
        ink: color of the words.
        shade: color laid over the background, with opacity `strength` times the probability.
        strength: opacity of the shade at probability 1.
    """

    card: tuple[int, int, int]
    ink: tuple[int, int, int]
    shade: tuple[int, int, int]
    strength: float

    def behind(self, probability: float) -> tuple[float, ...]:
        """Background color of a token of this probability."""
        opacity = self.strength * probability
        return tuple(opacity * shade + (1 - opacity) * card for shade, card in zip(self.shade, self.card, strict=True))


LIGHT = ShadingColors(card=(255, 255, 255), ink=(23, 28, 38), shade=(224, 40, 30), strength=0.6)
DARK = ShadingColors(card=(24, 29, 37), ink=(236, 240, 246), shade=(235, 60, 50), strength=0.6)
"""One hue of growing strength, so that the shade can be read without telling red from green."""


@dataclass(frozen=True)
class ShadedText:
    """A text and the probability that each of its tokens was replaced.

    Attributes:
        offsets: (start, end) of each token in the text, in characters, in order.
        probabilities: one for each token, in 0-1.
    """

    text: str
    offsets: Sequence[tuple[int, int]]
    probabilities: Sequence[float]


@dataclass(frozen=True)
class ShadedPiece:
    """A part of a shaded text: a token, or the characters between two tokens.

    Attributes:
        probability: probability of the token; None between tokens.
        token: index of the token in the text; None between tokens.
    """

    text: str
    probability: float | None
    token: int | None = field(default=None, compare=False)

    @property
    def tooltip(self) -> str:
        """The probability, to be shown when the piece is pointed at; empty between tokens."""
        return "" if self.probability is None else f"{self.probability:.3f}"

    @property
    def is_marked(self) -> bool:
        """Whether the probability is above 1/2."""
        return self.probability is not None and self.probability > 0.5


def shaded_pieces(shaded: ShadedText) -> list[ShadedPiece]:
    """The whole text, cut at its tokens. Where tokens share a character, as its bytes do, the highest probability counts."""
    pieces: list[ShadedPiece] = []
    done = 0
    for number, ((start, end), probability) in enumerate(zip(shaded.offsets, shaded.probabilities, strict=True)):
        if end <= done:
            last = pieces[-1] if pieces else None
            if last is not None and start < end and last.probability is not None and last.probability < probability:
                pieces[-1] = ShadedPiece(last.text, probability, number)
            continue
        if start > done:
            pieces.append(ShadedPiece(shaded.text[done:start], None))
        pieces.append(ShadedPiece(shaded.text[max(start, done) : end], probability, number))
        done = end
    if done < len(shaded.text):
        pieces.append(ShadedPiece(shaded.text[done:], None))
    return pieces


EntityOutcome = Literal["", "right", "missed", "invented", "confused"]
_Span = tuple[int, int, str]
# A number as the pages write it, possibly with its spread.
_NUMBER = re.compile(r"[-+\u2212]?\d[\d,]*(\.\d+)?%?( \u00b1 \d[\d,]*(\.\d+)?)?")
_IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f]")
_NO_SPAN: _Span = (-1, -1, "")


@dataclass(frozen=True)
class EntityPiece:
    """Consecutive words of a tagged text that belong to the same entity, or to none.

    Attributes:
        text: the words, with the spaces between them.
        outcome: whether the entity was found; "" outside of all entities.
        label: the label shown: "PER", "PER missed", "PER invented", "PER, not LOC".
        after: what separates the piece from the next one: a space, or nothing in Chinese and Japanese.
    """

    text: str
    outcome: EntityOutcome = ""
    label: str = ""
    after: str = ""


@dataclass(frozen=True)
class TaggedTexts:
    """Texts of one tagging task, under a title."""

    title: str
    texts: Sequence[Sequence[EntityPiece]]


def entity_pieces(record: Mapping[str, Any]) -> list[EntityPiece]:
    """The text of a mistake of a tagging task, cut at its entities.

    Args:
        record: `words`, predicted `tags`, `gold` tags, and, where tags mark spans, `spans`, `missed` and `invented`, each a list
            of (start, end, kind) in words.
    """
    words = [str(word) for word in record["words"]]
    if "spans" in record:
        predicted = {_span(each) for each in record["spans"]}
        gold = (predicted - {_span(each) for each in record["invented"]}) | {_span(each) for each in record["missed"]}
        pairs = list(zip(_by_word(gold, len(words)), _by_word(predicted, len(words)), strict=True))
    else:  # tags of single words, such as parts of speech: correct ones are not shown
        both = zip(record["gold"], record["tags"], strict=True)
        pairs = [
            (_NO_SPAN, _NO_SPAN) if one == other else ((place, place + 1, str(one)), (place, place + 1, str(other)))
            for place, (one, other) in enumerate(both)
        ]
    return _pieces(words, pairs)


def _pieces(words: Sequence[str], pairs: Sequence[tuple[_Span, _Span]]) -> list[EntityPiece]:
    """Runs of words with the same gold span and the same predicted span."""
    pieces: list[EntityPiece] = []
    begins = 0
    for place in range(1, len(words) + 1):
        if place < len(words) and pairs[place] == pairs[begins]:
            continue
        text = words[begins]
        for before, word in zip(words[begins : place - 1], words[begins + 1 : place], strict=True):
            text += _between(before, word) + word
        after = _between(words[place - 1], words[place]) if place < len(words) else ""
        pieces.append(EntityPiece(text, *_outcome(*pairs[begins]), after))
        begins = place
    return pieces


def _outcome(gold: _Span, predicted: _Span) -> tuple[EntityOutcome, str]:
    if gold == predicted == _NO_SPAN:
        return "", ""
    if predicted == _NO_SPAN:
        return "missed", f"{gold[2]} missed"
    if gold == _NO_SPAN:
        return "invented", f"{predicted[2]} invented"
    return ("right", gold[2]) if gold[2] == predicted[2] else ("confused", f"{predicted[2]}, not {gold[2]}")


def _by_word(spans: set[_Span], count: int) -> list[_Span]:
    """The span that each word belongs to."""
    found = [_NO_SPAN] * count
    for span in spans:
        found[span[0] : span[1]] = [span] * (span[1] - span[0])
    return found


def _span(values: Sequence[Any]) -> _Span:
    start, end, kind = values
    return int(start), int(end), str(kind)


def _between(before: str, after: str) -> str:
    return "" if _IDEOGRAPH.match(before[-1:]) or _IDEOGRAPH.match(after[:1]) else " "


@dataclass(frozen=True)
class Table:
    """A table of texts and numbers.

    Attributes:
        rows: as many cells as columns.
        note: a paragraph below the table, or "".
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    note: str = ""

    @property
    def numeric(self) -> frozenset[int]:
        """Indices of the columns of numbers, which are right-aligned; a cell may also be empty."""
        columns = enumerate(zip(*self.rows, strict=True))
        return frozenset(
            index
            for index, cells in columns
            if set(cells) != {""} and all(not isinstance(cell, str) or not cell or _NUMBER.fullmatch(cell) for cell in cells)
        )


@dataclass(frozen=True)
class Page:
    """The contents of a page. Empty parts are left out.

    Attributes:
        facts: (name, value) pairs for the head of the page.
        curves: charts, in the order of the page.
        metrics: metrics of the last evaluation.
        evaluated_at: step of that evaluation.
        tables: tables below the metrics, in the order of the page.
        tagged: texts with their entities, below the tables.
        detections: texts whose tokens are shaded.
        configuration: TOML, shown unchanged.
        notes: paragraphs on how to read the page.
        verdict: paragraphs at the top: what was trained and how good it is, then what it does well and what it does not.
        confusions: confusion matrices, beside the curves.
        before_and_after: the same held-out texts at an early and at a late evaluation, each with a label.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    curves: Sequence[Chart]
    metrics: Sequence[HeldOutMetric] = ()
    evaluated_at: int | None = None
    tables: Sequence[Table] = ()
    tagged: Sequence[TaggedTexts] = ()
    detections: Sequence[ShadedText] = ()
    configuration: str = ""
    notes: Sequence[str] = ()
    verdict: Sequence[str] = ()
    confusions: Sequence[Confusion] = ()
    before_and_after: Sequence[tuple[str, Sequence[ShadedPiece]]] = ()


def render_page(page: Page) -> str:
    """The page as an HTML string. The same page gives the same string, and every text in it is escaped."""
    names = [f"chart-{number}" for number in range(1, len(page.curves) + 1)]
    return render_template(
        "page.html",
        page=page,
        curves=[(name, chart, chart_svg(chart, name)) for name, chart in zip(names, page.curves, strict=True)],
        texts=[shaded_pieces(text) for text in page.detections],
    )


def render_template(name: str, *, package: str = "discern.report", **values: object) -> str:
    """A template with its values, escaped, and with the skeleton and the stylesheet of all pages.

    Args:
        package: package of the template; what it includes may be in `discern.report`.
    """

    def text_of(wanted: str) -> str:
        return package_text(wanted, package if files(package).joinpath(wanted).is_file() else "discern.report")

    environment = Environment(
        loader=FunctionLoader(text_of), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["code"] = as_code
    html = environment.get_template(name).render(light=LIGHT, dark=DARK, **values)
    # Half a surrogate pair, as in a badly encoded argument, becomes "?".
    return html.encode("utf-8", "replace").decode("utf-8")


def as_code(text: str) -> Markup:
    """A text with what is between backticks as code; everything is escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its counterpart
        return escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(part) if number % 2 else part for number, part in enumerate(parts))


def package_text(name: str, package: str = "discern.report") -> str:
    """The text of a file of a package: a template, the stylesheet, a script."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def script_hash(script: str) -> str:
    """The hash by which the content security policy of a page allows its script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def embedded(value: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can close the element or open another one."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
