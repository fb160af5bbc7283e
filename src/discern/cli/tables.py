"""Tables on a terminal of any width: words and numbers are never broken. Tables that are too wide are split."""

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
    if needs:  # what the rows are called stands on one line, where it is short
        longest = max((cell_len(_plain(cell)) for cell in table.columns[0].cells), default=0)
        needs[0] = max(needs[0], longest) if longest <= width // 3 else needs[0]
    first, rest = list(range(len(needs)))[:1], list(range(len(needs)))[1:]
    parts: list[list[int]] = []
    for place in rest:
        if parts and _width(needs[each] for each in (*first, *parts[-1], place)) <= width:
            parts[-1].append(place)
        else:
            parts.append([place])
    return [_part(table, [*first, *part], needs, width) for part in parts or [[]]]


def _need(column: Column) -> int:
    """The least width at which no word of a column is broken."""
    texts = [column.header, *column.cells]
    words = (word for text in texts for word in _plain(text).split())
    return max(map(cell_len, words), default=0)


def _plain(text: object) -> str:
    return text.plain if isinstance(text, Text) else str(text)


def _width(needs: Iterable[int]) -> int:
    return sum(need + _PADDING for need in needs) + 1


def _part(table: Table, places: list[int], needs: list[int], width: int) -> Table:
    """Some columns of a table, none of them narrower than it needs; what is left goes to those that would fold."""
    part = copy(table)
    part.columns = []
    left = width - _width(needs[place] for place in places)
    for index, place in enumerate(places):
        column = copy(table.columns[place])
        whole = max(cell_len(_plain(text)) for text in (column.header, *column.cells))
        more = max(0, min(whole - needs[place], left))
        left -= more
        # Fixed: left to itself the library takes from all columns alike.
        column._index, column.width, column.overflow = index, needs[place] + more, "fold"
        part.columns.append(column)
    return part
