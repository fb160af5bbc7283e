"""One self-contained HTML page about a run: no script, no file beside it, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from discern.report.charts import Picture, chart_svg
from discern.report.journal import HeldOutFigure
from discern.report.shading import ShadedText, cut
from discern.report.tagged import TaggedTexts

_TEMPLATE = "page.html"


@dataclass(frozen=True)
class Table:
    """A table of texts and numbers.

    Attributes:
        rows: as many cells as columns; numbers stand at the right.
        note: a paragraph below, or "".
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """What the page shows. A part that is empty is left out.

    Attributes:
        facts: (name, value) pairs for the head of the page.
        verdict: sentences on what the model does well and what it does not, a paragraph each, before all else.
        curves: charts in the order of the page.
        figures: of the last evaluation.
        evaluated_at: the step of that evaluation.
        tables: below the figures, in the order of the page.
        tagged: texts with their entities marked, below the tables.
        detections: texts whose tokens are shaded.
        configuration: TOML, shown as it is.
        notes: paragraphs on how to read the page.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    curves: Sequence[Picture]
    figures: Sequence[HeldOutFigure] = ()
    evaluated_at: int | None = None
    tables: Sequence[Table] = ()
    tagged: Sequence[TaggedTexts] = ()
    detections: Sequence[ShadedText] = ()
    configuration: str = ""
    notes: Sequence[str] = ()
    verdict: Sequence[str] = ()


def render_page(page: Page) -> str:
    """The page as one HTML string: the same page gives the same string, and every text in it is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("discern.report").joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    names = [f"chart-{number}" for number in range(1, len(page.curves) + 1)]
    html = template.render(
        page=page,
        curves=[(name, chart, chart_svg(chart, name)) for name, chart in zip(names, page.curves, strict=True)],
        texts=[cut(text) for text in page.detections],
    )
    return html.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair, as in a badly encoded argument, becomes "?"
