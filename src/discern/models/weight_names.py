"""Renaming of weights between our modules and another library's, by tables of layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def renamed(name: str, table: Mapping[str, str]) -> str:
    """The new name of a weight, by a table of layers or of single weights.

    Args:
        name: the old name, such as "blocks.3.expand.weight".
        table: new names by old ones, with "#" for the number of a block: {"blocks.#.expand": "layer.#.dense"}.

    Raises:
        KeyError: the table has no such layer.
    """
    number = _NUMBER.search(name)
    pattern = _NUMBER.sub("#", name, count=1)
    layer, _, kind = pattern.rpartition(".")
    new = table[pattern] if pattern in table else f"{table[layer]}.{kind}"
    return new.replace("#", number[0]) if number else new


def inverted(table: Mapping[str, str]) -> dict[str, str]:
    """The inverse of a table."""
    return {new: old for old, new in table.items()}
