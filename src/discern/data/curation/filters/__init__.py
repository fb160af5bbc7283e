"""Filters: rules that leave out documents, or lines of them. One line here for each; a file of rules by their source.

A filter is registered as a function that takes the argument of the filter, which follows a colon in its name (`words:20`) and is
None without one, and returns a rule. A rule takes a document and returns it, possibly with fewer lines, or the reason why it is
left out. Other packages register filters under the entry point group `discern.filters`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from discern.data.sources.documents import Document
from discern.errors import ConfigError, DataError
from discern.registry import Registry

Rule = Callable[[Document], Document | str]

filters: Registry[Any] = Registry("filter", "discern.filters")
filters.register("words", "discern.data.curation.filters.length:words")
filters.register("language", "discern.data.curation.filters.language:language")
filters.register("gopher-quality", "discern.data.curation.filters.gopher:quality")
filters.register("gopher-repetition", "discern.data.curation.filters.gopher:repetition")
filters.register("c4", "discern.data.curation.filters.c4:c4")

_PACKAGES = {"language": "py3langid"}


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that the results of filters depend on; 'none' if one is not installed."""
    kinds = {name.partition(":")[0] for name in names}
    found = {}
    for package in (package for kind, package in _PACKAGES.items() if kind in kinds):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


class Rules:
    """Several filters, applied one after the other.

    Args:
        names: names of the filters, each with its argument, such as `words:20`.

    Raises:
        ConfigError: there is no filter of a name, one is given twice, or an argument is of another form.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"the filter {min(repeated)} is given twice", hint="give each --filter once")
        self._rules: list[tuple[str, Rule]] = []
        for name in names:
            kind, colon, argument = name.partition(":")
            before, equals, after = name.partition("=")
            if equals and before in filters.names():
                raise ConfigError(f"unknown filter '{name}'", hint=f"did you mean '{before}:{after}'?")
            self._rules.append((kind, filters.load(kind)(argument if colon else None)))

    def apply(self, documents: Sequence[Document]) -> tuple[list[Document], Counter[str]]:
        """The documents that all filters keep, and the number left out by filter and reason."""
        found, dropped = self.in_place(documents)
        return [document for document in found if document is not None], dropped

    def in_place(self, documents: Sequence[Document]) -> tuple[list[Document | None], Counter[str]]:
        """The documents, with None in the places of those left out, and the number left out by filter and reason."""
        if not self._rules:
            return list(documents), Counter()
        found = [self._one(document) for document in documents]
        dropped = Counter(reason for reason in found if isinstance(reason, str))
        return [None if isinstance(each, str) else each for each in found], dropped

    def _one(self, document: Document) -> Document | str:
        for name, rule in self._rules:
            found = rule(document)
            if isinstance(found, str):
                return f"{name}: {found}"
            document = found
        return document


def all_left_out(filtered: Mapping[str, int]) -> DataError:
    """The error that no document is left.

    Args:
        filtered: number of documents that were left out, by filter and reason.
    """
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(filtered.items()))
    return DataError(f"the filters leave out every document ({reasons})", hint="leave out a --filter, or relax it")


def no_argument(name: str, argument: str | None) -> None:
    """Check that a filter without settings is given none.

    Raises:
        ConfigError: it is given one.
    """
    if argument is not None:
        raise ConfigError(f"the filter {name} takes no argument, but '{argument}' is given", hint=f"--filter {name}")
