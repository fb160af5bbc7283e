"""A filter by length."""

from __future__ import annotations

import re

from discern.data.curation.filters import Rule
from discern.data.sources.documents import Document
from discern.errors import ConfigError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def words(argument: str | None) -> Rule:
    """Keeps documents by their number of words, separated by spaces: `words:20` at least 20, `words:20-5000` also at most 5000.

    Raises:
        ConfigError: the argument is of another form.
    """
    match = _RANGE.fullmatch(argument or "")
    if match is None:
        raise ConfigError(f"the filter words needs a number of words, but '{argument or ''}' is given", hint="--filter words:20")
    least, most = int(match[1]), int(match[2]) if match[2] else None

    def rule(document: Document) -> Document | str:
        count = sum(len(sentence.split()) for sentence in document)
        if count < least:
            return f"fewer than {least:,} words"
        if most is not None and count > most:
            return f"more than {most:,} words"
        return document

    return rule
