"""Reads pairs of texts, single texts, and folders of queries, documents and relevance into groups of texts.

A folder has the layout of BEIR: `queries.jsonl` and `corpus.jsonl` with `_id` and `text` (documents also `title`), and a table
`qrels/test.tsv`, `qrels/dev.tsv` or `relevance.tsv` with `query-id`, `corpus-id` and `score`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from discern.data.sources.base import TEXT_NAMES
from discern.data.sources.problems import ProblemLog
from discern.errors import ConfigError, DataError
from discern.tasks.examples import Reading, TextGroup
from discern.tasks.readers.table import Row, Table, TableFormat, number_in, open_table, text_of, value_of, written
from discern.wording import counted

PAIR_NAMES = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("query", "document"),
    ("question", "answer"),
    ("sentence1", "sentence2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("premise", "hypothesis"),
)
_ALONE = ("anchor", "text", "sentence")
_SCORES = ("score", "similarity")
_NEGATIVE = re.compile(r"negatives?|negative_?\d+", re.IGNORECASE)
_QUERIES, _DOCUMENTS = ("queries.jsonl",), ("corpus.jsonl", "documents.jsonl")
_RELEVANCE = {
    "dev": ("qrels/dev.tsv", "qrels/test.tsv", "relevance.tsv"),
    "test": ("qrels/test.tsv", "qrels/dev.tsv", "relevance.tsv"),
}


@dataclass(frozen=True, slots=True)
class GroupColumns:
    """The columns that the user named; those that are None are recognized by their names, in each file separately."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class FoundColumns:
    """The columns of a file.

    Attributes:
        positive: None: the file has single texts.
        score: column of the similarity of anchor and positive, as judged by people.
    """

    anchor: str
    positive: str | None = None
    score: str | None = None


def group_columns(table: Table, named: GroupColumns) -> FoundColumns:
    """The columns of a table.

    Raises:
        ConfigError: a named column does not exist, or none can be recognized; the message lists the columns of the table.
    """
    lowered = {column.lower(): column for column in table.columns}
    anchor = table.require(named.text, "--text") if named.text and named.text in table.columns else None
    positive = table.require(named.pair, "--pair") if named.pair and named.pair in table.columns else None
    if anchor is None or positive is None:
        known = next(((lowered[a], lowered[b]) for a, b in PAIR_NAMES if a in lowered and b in lowered), None)
        usual = [lowered[name] for name in TEXT_NAMES if name in lowered]
        alone = next((lowered[name] for name in _ALONE if name in lowered), usual[0] if len(usual) == 1 else None)
        if known is not None and anchor is None and positive is None:
            anchor, positive = known
        elif positive is not None and named.text is None:
            anchor = next((lowered[a] for a, b in PAIR_NAMES if b == positive.lower() and a in lowered), None)
        elif positive is None and named.pair is None:
            anchor = anchor or alone
    if anchor is None or (named.pair is not None and positive is None):
        raise ConfigError(
            f"{table.name} has no columns for pairs of texts: expected anchor and positive (and negative), or a single column "
            f"text; its columns: {', '.join(table.columns) or 'none'}",
            hint="name them: --text COLUMN --pair COLUMN",
        )
    score = None
    if positive is not None:
        label = named.label if named.label in table.columns else None
        score = label or next((lowered[name] for name in _SCORES if name in lowered), None)
    return FoundColumns(anchor, positive, score)


def read_groups(
    path: Path,
    named: GroupColumns,
    *,
    training: bool,
    format: TableFormat | None = None,
    positive_score: float | None = None,
    labeled: bool = True,
    judged: bool = False,
) -> Reading[TextGroup]:
    """The rows of a table as groups of texts. Ids are row numbers from 0.

    Args:
        training: read what can be learned from: pairs of equal texts without a score are left out, and a single text is its own
            positive.
        positive_score: for a training file with scores: the lowest score of a positive pair; None: keep all with their scores.
        labeled: False: do not read scores. If the table has some, every pair is kept, and its similarity is to be predicted.
        judged: for a table that is not labeled: the same although it has no scores.

    Raises:
        ConfigError: a column does not exist or cannot be recognized, or there is a `positive_score` without scores.
        DataError: there are no rows, a text is empty, a score is not a number, or nothing is left to learn from.
    """
    table = open_table(path, format)
    columns = group_columns(table, named)
    if training and columns.score is None and positive_score is not None:
        raise ConfigError(
            f"task.positive_score is {positive_score:g}, but {table.name} has no column of scores",
            hint="leave it out, or --label COLUMN",
        )
    judged = not labeled and columns.positive is not None and (judged or columns.score is not None)
    problems, places, examples = ProblemLog(), [], []
    contrasted: dict[str, None] = {}  # columns, in the order of their appearance: records of JSON may have different keys
    for number, row in enumerate(table.rows):
        if table.format == "text" and not row.values["text"].strip():
            continue  # a line between paragraphs
        score = _score(row, columns.score) if columns.score is not None and labeled else None
        negatives = [column for column in row.values if _NEGATIVE.fullmatch(column)] if columns.positive is not None else []
        contrasted |= dict.fromkeys(negatives)
        texts = _texts(row, columns, negatives, problems)
        if training:
            if score is not None and positive_score is not None:
                if score < positive_score:
                    problems.add(f"pair with a score below {positive_score:g}, left out", row.where)
                    continue
                score = None
            if columns.positive is None:
                texts = (texts[0], texts[0])
        if columns.positive is not None and score is None and not judged and texts[0] == texts[1]:
            problems.add("anchor and positive are the same text, left out", row.where)
            continue
        examples.append(TextGroup(str(number), texts, score, judged=judged))
        places.append(row.where)
    if not examples:
        shown = "; ".join(map(str, problems.summary())) or "a header but no rows"
        raise DataError(
            f"{table.name} has no pairs to use: {shown}",
            hint="the two texts of a pair must differ; to train on single texts, give a file with the single column 'text'",
        )
    found = {"anchor": columns.anchor, "positive": columns.positive, "score": columns.score}
    found |= {f"negative {place}": name for place, name in enumerate(contrasted, start=1)}
    note = "columns: " + ", ".join(f"{role} = '{name}'" for role, name in found.items() if name is not None)
    return Reading(tuple(examples), table.name, problems.summary(), (note,), tuple(places))


def _texts(row: Row, columns: FoundColumns, negatives: Sequence[str], problems: ProblemLog) -> tuple[str, ...]:
    texts = [text_of(row, columns.anchor)]
    if columns.positive is not None:
        texts.append(text_of(row, columns.positive))
    for column in negatives:
        value = value_of(row, column)
        for each in value if isinstance(value, list) else [value]:
            text = written(each)
            if text is None:
                raise DataError(
                    f"{row.where}: '{column}' is {value!r:.60}, expected a text or a list of texts",
                    hint="remove it, or give a text",
                )
            if text in texts:
                problems.add("negative that is also another text of its row, left out", row.where)
            elif text:  # a row may have fewer negatives than others
                texts.append(text)
    return tuple(texts)


def _score(row: Row, column: str) -> float:
    text = written(value_of(row, column))
    number = number_in(text) if text else None
    if number is None or not math.isfinite(number):
        raise DataError(
            f"{row.where}: '{column}' is {value_of(row, column)!r:.40}, expected a number",
            hint="the score says how similar the two texts are; remove the row, or the column",
        )
    return number


def is_retrieval(path: Path) -> bool:
    """Whether a path is a folder of queries and documents, or the file of such a folder that says which are relevant."""
    return path.is_dir() or (path.parent.name == "qrels" and (path.parent.parent / _QUERIES[0]).is_file())


def read_retrieval(
    path: Path, split: Literal["dev", "test"], unjudged: Literal["refuse", "leave-out"] = "refuse"
) -> Reading[TextGroup]:
    """The queries and then the documents of a folder.

    Args:
        path: the folder, or one of its files in `qrels`.
        split: which of these files to prefer if `path` is the folder.
        unjudged: queries without a relevant document are an error, or left out.

    Raises:
        DataError: a file is missing or has no rows, an id occurs twice, the relevance names an unknown query or document or has
            two grades for the same, or a query has no relevant document.
    """
    folder = path if path.is_dir() else path.parent.parent
    queries = dict(_records(_first_of(folder, _QUERIES), title=False))
    documents = dict(_records(_first_of(folder, _DOCUMENTS), title=True))
    judgments = _first_of(folder, _RELEVANCE[split]) if path.is_dir() else path
    relevant: dict[str, dict[str, float]] = {}
    for where, query, document, grade in _relevance(judgments):
        for what, name, known in (("query", query, queries), ("document", document, documents)):
            if name not in known:
                raise DataError(
                    f"{where}: there is no {what} '{name}'",
                    hint="use the values of `_id` in queries.jsonl and corpus.jsonl as ids",
                )
        if grade > 0:
            before = relevant.setdefault(query, {}).setdefault(document, grade)
            if before != grade:
                raise DataError(
                    f"{where}: document '{document}' has grade {grade:g} for query '{query}', but {before:g} in an earlier row",
                    hint="remove one of the two rows",
                )
    without = [name for name in queries if name not in relevant]
    if without and (unjudged == "refuse" or len(without) == len(queries)):
        raise DataError(
            f"{len(without):,} of {len(queries):,} queries have no relevant document in {judgments}, such as '{without[0]}'",
            hint="add them, or --set task.unjudged=leave-out",
        )
    asked = [TextGroup(name, (queries[name],), relevant=tuple(relevant[name].items())) for name in queries if name in relevant]
    notes = [f"{len(asked):,} queries, {counted(len(documents), 'document')}, relevance from {judgments.name}"]
    if without:
        notes.append(f"queries without a relevant document, left out: {len(without):,}")
    held = [TextGroup(name, (text,)) for name, text in documents.items()]
    return Reading((*asked, *held), str(path), (), tuple(notes), indivisible=True)


def _first_of(folder: Path, names: tuple[str, ...]) -> Path:
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
        raise DataError(
            f"{folder} has no {' or '.join(names)}; it contains {held}",
            hint="a folder of queries and documents has queries.jsonl, corpus.jsonl and qrels/test.tsv, as in BEIR",
        )
    return found


def _records(path: Path, *, title: bool) -> Iterator[tuple[str, str]]:
    """The id and the text of each record; the title is put before the text."""
    seen: set[str] = set()
    for row in open_table(path, "jsonl").rows:
        name = text_of(row, "_id")
        if name in seen:
            raise DataError(f"{row.where}: the id '{name}' occurs twice", hint="give every record an id of its own")
        seen.add(name)
        heading = (written(row.values.get("title")) or "") if title else ""
        # Some documents of BEIR's collections consist of their title.
        text = "" if heading and written(value_of(row, "text")) == "" else text_of(row, "text")
        yield name, f"{heading} {text}".strip()


def _relevance(path: Path) -> Iterator[tuple[str, str, str, float]]:
    """Place, query, document and grade of each row; 1 without a column of grades."""
    table = open_table(path, "tsv")
    columns: list[Any] = [next((name for name in names if name in table.columns), None) for names in _RELEVANCE_COLUMNS]
    query, document, grade = columns
    if query is None or document is None:
        raise DataError(
            f"{path} has the columns {', '.join(table.columns)}, expected query-id, corpus-id and score",
            hint="separate them by tabs, below a header",
        )
    for row in table.rows:
        yield row.where, text_of(row, query), text_of(row, document), _score(row, grade) if grade is not None else 1.0


_RELEVANCE_COLUMNS = (("query-id", "query_id", "query"), ("corpus-id", "document_id", "document"), ("score", "relevance"))
