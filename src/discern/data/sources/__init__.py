"""Sources: formats of files and places that text is read from. One file and one line here for each."""

from __future__ import annotations

from typing import Any

from discern.registry import Registry

sources: Registry[Any] = Registry("source", "discern.sources")
sources.register("text", "discern.data.sources.text:TextSource")
sources.register("jsonl", "discern.data.sources.jsonl:JsonLinesSource")
sources.register("parquet", "discern.data.sources.parquet:ParquetSource")
sources.register("table", "discern.data.sources.table:TableSource")
sources.register("wikiextractor", "discern.data.sources.wikiextractor:WikiExtractorSource")
sources.register("warc", "discern.data.sources.warc:WarcSource")
sources.register("tar", "discern.data.sources.tar:TarSource")
sources.register("hf", "discern.data.sources.hf:HubSource")
