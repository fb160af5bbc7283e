"""Wording that messages of all parts share."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`count` and `noun`, which gets an "s" unless the count is 1: "1 row", "1,024 rows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
