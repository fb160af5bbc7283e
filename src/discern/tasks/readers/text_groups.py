"""Reads pairs of texts, single texts, and folders of queries, documents and relevance into groups of texts.

A folder has the layout of BEIR: `queries.jsonl` and `corpus.jsonl` with `_id` and `text` (documents also `title`), and a table
`qrels/dev.tsv` or `qrels/test.tsv` with `query-id`, `corpus-id` and `score`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from discern.data.sources.documents import ProblemLog
from discern.data.tables import Row, Table, number_in, open_table
from discern.errors import ConfigError, DataError, counted
from discern.tasks.base import Reading, TextGroup
from discern.tasks.rows import text_of, value_of, written

_NAMES = (("anchor", "positive"), ("sentence1", "sentence2"), ("text", None))
_NEGATIVE = re.compile(r"negatives?|negative_\d+")


def group_columns(table: Table, named: Mapping[str, str]) -> tuple[str, str | None, str | None]:
    """The columns of the anchor, of the positive (None: single texts) and of the score of a pair (None: there are none).

    Args:
        named: columns that the user named, by the roles text, pair and label. In a file that lacks them, columns are recognized
            by their names.

    Raises:
        ConfigError: none can be recognized; the message lists the columns of the table.
    """
    for anchor, positive in ((named.get("text"), named.get("pair")), *_NAMES):
        if anchor in table.columns and (positive is None or positive in table.columns):
            scores = (column for column in (named.get("label"), "score") if positive is not None and column in table.columns)
            return str(anchor), positive, next(scores, None)
    raise ConfigError(
        f"{table.name} has no columns for pairs of texts: expected anchor and positive (and negative), sentence1 and sentence2 "
        f"(and score), or a single column text; its columns: {', '.join(table.columns) or 'none'}",
        hint="name them: --text COLUMN --pair COLUMN",
    )


def read_groups(
    path: Path,
    named: Mapping[str, str],
    *,
    training: bool,
    format: str | None = None,
    positive_score: float | None = None,
) -> Reading[TextGroup]:
    """The rows of a table as groups of texts. Ids are row numbers from 0.

    Pairs of equal texts are left out, unless they have a score. The negatives of pairs with a score are not read.

    Args:
        training: whether the table may have single texts, each of which is its own positive.
        positive_score: for a table with scores: the lowest score of a positive pair; None: keep all pairs with their scores.

    Raises:
        ConfigError: the columns cannot be recognized, there are only single texts, or there is a `positive_score` without scores.
        DataError: there are no rows, a text is empty, a score is not a number, or no pair is left.
    """
    table = open_table(path, format)
    anchor, positive, score_column = group_columns(table, named)
    if positive is None and not training:
        raise ConfigError(
            f"{path} has single texts, but an evaluation needs pairs",
            hint="give pairs (anchor, positive), judged pairs (sentence1, sentence2, score), or a folder of queries",
        )
    if positive_score is not None and score_column is None:
        raise ConfigError(
            f"task.positive_score is {positive_score:g}, but {table.name} has no column of scores",
            hint="leave it out, or --label COLUMN",
        )
    problems, examples = ProblemLog(), []
    negatives: dict[str, None] = {}  # records of JSON may have different keys
    for number, row in enumerate(table.rows):
        if table.format == "text" and not row.values["text"].strip():
            continue  # a line between paragraphs
        texts = [text_of(row, anchor), text_of(row, positive or anchor)]
        score = _number(row, score_column) if score_column is not None else None
        if score is not None and positive_score is not None:
            if score < positive_score:
                problems.add(f"pair with a score below {positive_score:g}, left out", row.where)
                continue
            score = None
        if positive is not None and score is None:
            if texts[0] == texts[1]:
                problems.add("anchor and positive are the same text, left out", row.where)
                continue
            for column in filter(_NEGATIVE.fullmatch, row.values):
                negatives[column] = None
                texts += _negatives(row, column)
        examples.append(TextGroup(str(number), tuple(texts), score))
    if not examples:
        shown = "; ".join(map(str, problems.summary())) or "a header but no rows"
        raise DataError(
            f"{table.name} has no pairs to use: {shown}",
            hint="the two texts of a pair must differ; to train on single texts, give a file with the single column 'text'",
        )
    columns = [("anchor", anchor), ("positive", positive), ("score", score_column), *(("negative", name) for name in negatives)]
    note = "columns: " + ", ".join(f"{role} = '{name}'" for role, name in columns if name)
    return Reading(tuple(examples), table.name, problems.summary(), (note,))


def _negatives(row: Row, column: str) -> list[str]:
    """The texts of a column of negatives; a row may have fewer than others, or none."""
    value = row.values[column]
    texts = [written(item) for item in (value if isinstance(value, list) else [value])]
    if None in texts:
        raise DataError(
            f"{row.where}: '{column}' is {value!r:.60}, expected a text or a list of texts", hint="remove it, or give a text"
        )
    return [text for text in texts if text]


def _number(row: Row, column: str) -> float:
    value = value_of(row, column)
    number = number_in(written(value) or "")
    if number is None or not math.isfinite(number):
        raise DataError(
            f"{row.where}: '{column}' is {value!r:.40}, expected a number",
            hint="the score says how similar the two texts are; remove the row, or the column",
        )
    return number


def is_retrieval(path: Path) -> bool:
    """Whether a path is a folder of queries and documents, or the file of such a folder that says which are relevant."""
    return path.is_dir() or path.parent.name == "qrels"


def read_retrieval(path: Path, unjudged: Literal["refuse", "leave-out"] = "refuse") -> Reading[TextGroup]:
    """The queries and then the documents of a folder.

    Args:
        path: the folder, of which `qrels/dev.tsv` is read or else `qrels/test.tsv`; or one of its files in `qrels`.
        unjudged: queries without a relevant document are an error, or left out.

    Raises:
        DataError: a file is missing or has no rows, an id occurs twice, the relevance names an unknown query or document, or a
            query has no relevant document.
    """
    folder, judgments = path, path / "qrels" / "dev.tsv"
    if not path.is_dir():
        folder, judgments = path.parent.parent, path
    elif not judgments.is_file():
        judgments = path / "qrels" / "test.tsv"
    for file in (folder / "queries.jsonl", folder / "corpus.jsonl", judgments):
        if not file.is_file():
            raise DataError(
                f"{folder} has no {file.relative_to(folder)}",
                hint="a folder of queries and documents has queries.jsonl, corpus.jsonl and qrels/test.tsv, as in BEIR",
            )
    queries, documents = _texts_by_id(folder / "queries.jsonl"), _texts_by_id(folder / "corpus.jsonl")
    relevant: dict[str, dict[str, float]] = {query: {} for query in queries}
    for row in open_table(judgments, "tsv").rows:
        query, document, grade = text_of(row, "query-id"), text_of(row, "corpus-id"), _number(row, "score")
        if query not in queries or document not in documents:
            raise DataError(
                f"{row.where}: there is no query '{query}' or no document '{document}'",
                hint="use the values of `_id` in queries.jsonl and corpus.jsonl as ids",
            )
        if grade > 0:
            relevant[query][document] = grade
    missing = [query for query in queries if not relevant[query]]
    if missing and (unjudged == "refuse" or len(missing) == len(queries)):
        raise DataError(
            f"{len(missing):,} of {len(queries):,} queries have no relevant document in {judgments}, such as '{missing[0]}'",
            hint="add them, or --set task.unjudged=leave-out",
        )
    examples = [
        TextGroup(query, (text,), relevant=tuple(relevant[query].items())) for query, text in queries.items() if relevant[query]
    ]
    note = (
        f"{len(examples):,} of {len(queries):,} queries, which have a relevant document in {judgments.name}; "
        f"{counted(len(documents), 'document')}"
    )
    examples += [TextGroup(name, (text,)) for name, text in documents.items()]
    return Reading(tuple(examples), str(path), notes=(note,), indivisible=True)


def _texts_by_id(path: Path) -> dict[str, str]:
    """The texts of the records, each after its title if it has one."""
    texts: dict[str, str] = {}
    for row in open_table(path, "jsonl").rows:
        name = text_of(row, "_id")
        if name in texts:
            raise DataError(f"{row.where}: the id '{name}' occurs twice", hint="give every record an id of its own")
        # Some documents of BEIR's collections consist of their title.
        title = written(row.values.get("title"))
        texts[name] = f"{title} {written(value_of(row, 'text'))}".strip() if title else text_of(row, "text")
    return texts
