"""Tables on a terminal of any width: never cut, no word or number broken. One that is too wide comes in parts."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from rich.cells import cell_len
from rich.table import Column, Table
from rich.text import Text

_PADDING = 3  # a blank on either side of a cell, and a line


def fitting(table: Table, width: int) -> list[Table]:
    """The table, or parts of it side by side below each other, each with the first column.

    Args:
        width: of the terminal, in columns.
    """
    needs = [_need(column) for column in table.columns]
    first, rest = list(range(len(needs)))[:1], list(range(len(needs)))[1:]
    parts: list[list[int]] = []
    for place in rest:
        if parts and _width(needs[each] for each in (*first, *parts[-1], place)) <= width:
            parts[-1].append(place)
        else:
            parts.append([place])
    return [_part(table, [*first, *part], needs) for part in parts or [[]]]


def _need(column: Column) -> int:
    """The least width at which no word of a column is broken."""
    texts = [column.header, *column.cells]
    words = (word for text in texts for word in (text.plain if isinstance(text, Text) else str(text)).split())
    return max(map(cell_len, words), default=0)


def _width(needs: Iterable[int]) -> int:
    return sum(need + _PADDING for need in needs) + 1


def _part(table: Table, places: list[int], needs: list[int]) -> Table:
    """Some columns of a table, none of them narrower than its longest word."""
    part = copy(table)
    part.columns = []
    for index, place in enumerate(places):
        column = copy(table.columns[place])
        column._index, column.min_width, column.overflow = index, needs[place], "fold"
        part.columns.append(column)
    return part
