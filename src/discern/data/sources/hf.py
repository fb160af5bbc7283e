"""Data sets of the Hugging Face hub, given as `hf:NAME[:CONFIGURATION[:SPLIT]]`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any, final

from discern.data.sources.base import NamedSource, ReadContext, record_texts
from discern.data.sources.documents import Document, Lines
from discern.errors import ConfigError, DataError, DiscernError

_FORM = "the form is hf:NAME[:CONFIGURATION[:SPLIT]]"


@final
class HubSource(NamedSource):
    """The rows of a data set on the hub, streamed; each row is a record."""

    def documents(self, address: str, context: ReadContext) -> Iterator[Document]:
        return context.cut_records(hub_records(address, context))


def hub_records(name: str, context: ReadContext) -> Iterator[Lines]:
    """The text of each row of a data set `NAME[:CONFIGURATION[:SPLIT]]` on the hub, streamed. The default split is `train`.

    Raises:
        ConfigError: there is no name, the extra `hf` is not installed, or the rows have no such field.
        DataError: the data set cannot be loaded.
    """
    path, _, rest = name.partition(":")
    configuration, _, split = rest.partition(":")
    if not path:
        raise ConfigError(f"hf:{name} names no data set", hint=_FORM)
    try:
        import datasets
    except ImportError as problem:
        raise ConfigError(f"hf:{name} needs the package datasets", hint="pip install 'discern-nlp[hf]'") from problem
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            path, configuration or None, split=split or "train", streaming=True
        )
        places = (f"hf:{name}: row {number:,}" for number in count(1))
        yield from record_texts(zip(places, rows, strict=False), context)
    except DiscernError:
        raise
    except Exception as problem:  # the library passes on any error of its many back ends
        raise DataError(f"hf:{name} cannot be read: {problem}", hint=_FORM) from problem
