"""Overlap with evaluation files: which examples count, on cases computed by hand, and the same whatever the workers."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from discern.data.check import check
from discern.data.curation.contamination import (
    ContaminationSearch,
    EvaluationFiles,
    FileOverlap,
    read_examples,
    words_of,
)
from discern.data.dataset.manifest import read_manifest
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.sources.documents import Document
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError
from discern.progress import Silent
from tests.data.small_text import made_up, plain, write_vocabulary

LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z".split()


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def search(files: Sequence[Path], documents: Sequence[Document | None], chunk: int = 100) -> tuple[FileOverlap, ...]:
    """The overlap of the documents, searched in chunks."""
    search = ContaminationSearch(EvaluationFiles(files))
    for start in range(0, len(documents), chunk):
        found = search.find(documents[start : start + chunk])
        search.add((ngram, "text", start + index + 1, begins) for ngram, (index, begins) in found.items())
    return search.results()


def test_words_have_no_case_and_no_punctuation() -> None:
    assert words_of('The "U.S." didn\'t—sell 1,000 ÉCLAIRS!') == "the u s didn t sell 1 000 éclairs".split()
    assert words_of("cafe\u0301 co\u00adop") == ["café", "coop"], "composed; a soft hyphen is no end of a word"
    assert words_of("I \u2764 it, \U0001f44d\U0001f3fd!") == ["i", "it"]
    assert words_of("中文 abcの हिन्दी _") == ["中", "文", "abc", "の", "हिन्दी"]


@pytest.mark.parametrize(
    ("name", "content", "fields", "expected"),
    [
        ("a.txt", "\ufeffOne line.\n\nAnother\n", [], [(1, ("One line.",)), (3, ("Another",))]),
        ("a.csv", 'id,text\n7,"A cat,\nasleep."\n8,\n', [], [(2, ("7", "A cat,\nasleep.")), (4, ("8", ""))]),
        ("a.tsv", "gj04\t1\tIt is.\ngj04\t0\tNo.\n", [], [(1, ("gj04", "1", "It is.")), (2, ("gj04", "0", "No."))]),
        ("a.json", '[{"a": "b", "q": [{"q": "c"}, {"n": 3}]}]', [], [(1, ("b", "c"))]),
        ("a.jsonl", '{"text": "a", "note": "b"}\n\n{"note": "c"}\n', ["text"], [(1, ("a",)), (3, ())]),
    ],
)
def test_examples(tmp_path: Path, name: str, content: str, fields: list[str], expected: object) -> None:
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
    assert list(read_examples(tmp_path / f"{name}.gz", fields)) == expected


@pytest.mark.parametrize(
    ("name", "content", "fields", "says"),
    [
        ("a.txt", " \n\n", [], "is empty"),
        ("a.jsonl", '{"text": "a"}\n{"text"\n', [], "jsonl:2: not JSON"),
        ("a.json", '{"data": [{"paragraphs": []}]}', [], "is one JSON object, expected one object per line, or an array"),
        ("a.txt", "a line\n", ["txet"], "has no column 'txet'"),
    ],
)
def test_what_has_no_examples_is_refused(tmp_path: Path, name: str, content: str, fields: list[str], says: str) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises((DataError, ConfigError), match=says) as caught:
        list(read_examples(path, fields))
    assert name in caught.value.message
    assert caught.value.hint


def test_a_case_by_hand(tmp_path: Path) -> None:
    lines = [
        LETTERS[:14],  # of its two 13-grams, the text has the second
        [*LETTERS[:12], "z", *LETTERS[13:20]],  # twelve words in a row are not enough
        LETTERS[5:13],  # eight words, as a whole
        [*LETTERS[5:13], "other"],  # nine words, of which the text has eight
        LETTERS[1:8],  # seven words
    ]
    text: list[Document | None] = [["Something else."], None, ["Here: B, C, D.", "(e f g h) I-J 'K' L; M N"]]
    (found,) = search([written(tmp_path / "test.txt", *map(" ".join, lines))], text)
    assert (found.examples, found.checked, found.too_short, found.overlapping, found.share) == (5, 4, 1, 2, 0.5)
    assert [(each.line, each.words, each.document, each.begins) for each in found.found] == [
        (1, " ".join(LETTERS[1:14]), 3, "Here: B, C, D. (e f g h) I-J 'K' L; M N"),
        (3, " ".join(LETTERS[5:13]), 3, "Here: B, C, D. (e f g h) I-J 'K' L; M N"),
    ]
    assert str(found).endswith("test.txt: 2 of 4 examples (50.00%); 1 of fewer than 8 words not checked")


def test_no_ngram_reaches_across_documents_or_texts(tmp_path: Path) -> None:
    first, second = " ".join(LETTERS[:6]), " ".join(LETTERS[6:13])
    evaluation = written(tmp_path / "test.txt", f"{first} {second}")
    assert search([evaluation], [[first], [second]])[0].overlapping == 0
    assert search([evaluation], [[first, second]])[0].overlapping == 1
    pair = written(tmp_path / "test.jsonl", *[json.dumps({"one": first, "two": second})] * 2)
    (apart,) = search([pair], [[first, second]])
    assert (apart.checked, apart.too_short, apart.share) == (0, 2, None)
    assert str(apart).endswith("test.jsonl: 0 of 0 examples; 2 of fewer than 8 words not checked")


def test_as_by_definition_on_random_text(tmp_path: Path) -> None:
    draw = random.Random(5)
    documents = [[" ".join(draw.choices("ab", k=40)) for _ in range(2)] for _ in range(12)]
    lines = [" ".join(draw.choices("ab", k=draw.randint(5, 16))) for _ in range(300)]
    overlapping = []
    for line, words in enumerate(map(str.split, lines), start=1):
        size = min(13, len(words))
        ngrams = [" ".join(words[first : first + size]) for first in range(len(words) - size + 1)]
        owners = [number for number, each in enumerate(documents, start=1) if any(ngram in " ".join(each) for ngram in ngrams)]
        if owners and size >= 8:
            overlapping.append((owners[0], line))
    files = [written(tmp_path / name, *lines) for name in ("a.txt", "b.txt")]
    for chunk in (5, 100):
        for found in search(files, documents, chunk):
            assert found.too_short == sum(len(line.split()) < 8 for line in lines)
            assert 20 < found.overlapping == len(overlapping) < found.checked
            assert [(each.document, each.line) for each in found.found] == sorted(overlapping)[:5]


def test_the_overlap_of_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discern.data.job.CHUNK_CHARACTERS", 1000)
    text, known = tmp_path / "text.txt", made_up(60)
    text.write_text("short\n\n" + plain(known))
    # Two examples of the text, one that is not, and one that is too short. What a filter leaves out is not searched, but counts.
    lines = ["sentence", known[7][0], known[9][2], "no " * 9, "cat"]
    against = EvaluationFiles([written(tmp_path / "dev.tsv", *lines)])
    tokenizer = TokenizerChoice(write_vocabulary(tmp_path / "vocab.txt"))
    for workers in (1, 3):
        common: dict[str, Any] = {"options": PrepareOptions(workers=workers, filters=("words:2",)), "progress": Silent()}
        made: dict[str, Any] = {"out": tmp_path / f"data{workers}", "tokenizer": tokenizer} | common
        with pytest.raises(DataError, match="absent cannot be read"):
            prepare([str(text)], **made, against=EvaluationFiles([tmp_path / "absent"]))
        assert not made["out"].exists()
        before = prepare([str(text)], **made).manifest
        assert before.overlap is None
        report = prepare([str(text)], **made, against=against)
        assert (report.unchanged, report.repaired, report.manifest.fingerprint) == (True, (), before.fingerprint)
        prepare([str(text)], **made)  # not asked for again: what is known is kept
        (overlap,) = read_manifest(made["out"]).overlap or ()
        assert (overlap.examples, overlap.checked, overlap.overlapping, overlap.share) == (4, 3, 2, 2 / 3)
        assert [(each.line, each.input, each.document) for each in overlap.found] == [(2, str(text), 9), (3, str(text), 11)]
        for choice in (None, tokenizer):
            assert check([str(text)], tokenizer=choice, against=against, **common).overlap == (overlap,)
