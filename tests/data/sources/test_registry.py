"""Sources are a registry: the order in which they are asked, and one that another package brings."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest
from discern.data.sources.base import FileSource, NamedSource, named_source

from discern.data.dataset.build import BuildOptions
from discern.data.prepare import prepare
from discern.data.sources import sources
from discern.data.tokenizer.choice import TokenizerChoice
from discern.progress import Silent
from discern.registry import Registry
from tests.data.small_text import read, tar_of

SUBTITLES = b"""WEBVTT

00:01.000 --> 00:04.000
Never drink liquid nitrogen.

00:05.000 --> 00:09.000
It will perforate your stomach.
"""

MODULE = '''
from discern.data.sources.base import FileSource, NamedSource
from discern.data.sources.documents import Lines
from discern.data.sources.text import text_lines


class Subtitles(FileSource):
    """WebVTT: the lines that are no times."""

    def recognizes(self, name, head):
        return head.startswith(b"WEBVTT")

    def documents(self, stream, context):
        return context.cut_text(self._spoken(text_lines(stream, context.name, context.problems)))

    def _spoken(self, batches):
        for batch in batches:
            kept = [line for line in batch.lines if line and "-->" not in line and line != "WEBVTT"]
            yield Lines(kept, batch.continues)


class Numbers(NamedSource):
    """`count:N`, a document for each number."""

    def documents(self, address, context):
        return context.cut_records(Lines([f"number {at}"], ends_record=True) for at in range(int(address)))
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that registers two sources."""
    about = tmp_path / "packages" / "subtitles-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: subtitles\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[discern.sources]\nwebvtt = subtitles:Subtitles\ncount = subtitles:Numbers\n")
    (tmp_path / "packages" / "subtitles.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    fresh: Registry[type[FileSource | NamedSource]] = Registry("source", "discern.sources")
    for name in sources.names():
        fresh.register(name, sources._targets[name])
    monkeypatch.setattr("discern.data.sources.base.sources", fresh)
    monkeypatch.delitem(sys.modules, "subtitles", raising=False)


def test_every_source_is_of_one_of_the_two_kinds() -> None:
    assert {"text", "jsonl", "parquet", "table", "wikiextractor", "tar", "hf"} <= set(sources.names())
    for name in sources.names():
        assert issubclass(sources.load(name), FileSource | NamedSource), name


def test_text_takes_what_no_other_source_recognizes() -> None:
    kinds = [kind for kind in map(sources.load, sources.names()) if issubclass(kind, FileSource)]
    assert min(kinds, key=lambda kind: kind.priority) is sources.load("text")


def test_a_path_with_a_colon_is_not_a_named_source() -> None:
    assert named_source("text:notes") is None
    assert named_source("C:/notes.txt") is None
    assert named_source("hf:wikitext") is not None


def test_a_source_of_another_package_reads_its_files(installed: None, tmp_path: Path) -> None:
    spoken = [["Never drink liquid nitrogen.", "It will perforate your stomach."]]
    (tmp_path / "film.vtt").write_bytes(SUBTITLES)
    assert read(tmp_path / "film.vtt") == spoken
    (tmp_path / "film.vtt.gz").write_bytes(gzip.compress(SUBTITLES))
    assert read(tmp_path / "film.vtt.gz") == spoken
    (tmp_path / "films.tar").write_bytes(tar_of({"film": SUBTITLES}))
    assert read(tmp_path / "films.tar") == spoken
    assert read("count:3") == [["number 0"], ["number 1"], ["number 2"]]


def test_a_data_set_is_prepared_from_a_source_of_another_package(installed: None, tmp_path: Path) -> None:
    (tmp_path / "film.vtt").write_bytes(SUBTITLES)
    choice = TokenizerChoice(train="bpe", vocab_size=270)
    inputs = [str(tmp_path / "film.vtt"), "count:3"]
    report = prepare(inputs, out=tmp_path / "data", tokenizer=choice, build=BuildOptions(workers=1), progress=Silent())
    assert report.manifest.statistics.documents == 4
    assert report.manifest.statistics.sentences == 5
    assert report.manifest.inputs == tuple(inputs)
