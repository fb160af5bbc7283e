"""Overlap with evaluation files: which examples count, on cases computed by hand, and the same whatever the workers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from discern.data.check import check
from discern.data.curation.contamination import EvaluationFiles, FileOverlap, NgramFinder, OverlapSearch, words_of
from discern.data.dataset.build import BuildOptions
from discern.data.dataset.manifest import read_manifest
from discern.data.prepare import prepare
from discern.data.sources.documents import CorpusOptions, Document
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError
from discern.progress import Silent
from tests.data.small_text import made_up, plain, write_vocabulary

LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z".split()


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def search(files: Path | list[Path], documents: list[Document], chunk: int = 100) -> tuple[FileOverlap, ...]:
    """The overlap of the documents, searched in chunks."""
    found = OverlapSearch(EvaluationFiles([files] if isinstance(files, Path) else files))
    finder = NgramFinder(found.index)
    for start in range(0, len(documents), chunk):
        found.add(finder.find(documents[start : start + chunk]), lambda index: ("text", index + 1))
    return found.results()


def test_words_have_no_case_and_no_punctuation() -> None:
    assert words_of('The "U.S." didn\'t—sell 1,000 ÉCLAIRS!') == "the u s didn t sell 1 000 éclairs".split()
    assert words_of("cafe\u0301 co\u00adop") == ["café", "coop"], "composed; a soft hyphen is no end of a word"
    emoji = words_of("I \u2764\ufe0f it 1\ufe0f\u20e3, \U0001f44d\U0001f3fd!")
    assert emoji == ["i", "it", "1"], "what chooses the look of an emoji is no word"
    assert words_of("中文 abcの हिन्दी _") == ["中", "文", "abc", "の", "हिन्दी"]


def test_a_case_by_hand(tmp_path: Path) -> None:
    evaluation = written(
        tmp_path / "test.txt",
        [
            " ".join(LETTERS[:14]),  # of its two 13-grams, the text has the second
            " ".join([*LETTERS[:12], "z", *LETTERS[13:20]]),  # twelve words in a row are not enough
            " ".join(LETTERS[5:13]),  # eight words, as a whole
            " ".join([*LETTERS[5:13], "other"]),  # nine words, of which the text has eight
            " ".join(LETTERS[1:8]),  # seven words
        ],
    )
    text = [["Something else."], ["Here: B, C, D.", "(e f g h) I-J 'K' L; M N"]]
    (found,) = search(evaluation, text)
    assert (found.examples, found.checked, found.too_short, found.overlapping, found.share) == (5, 4, 1, 2, 0.5)
    assert [(each.line, each.words, each.document) for each in found.found] == [
        (1, " ".join(LETTERS[1:14]), 2),
        (3, " ".join(LETTERS[5:13]), 2),
    ]
    assert found.found[0].begins.startswith("Here: B, C, D. (e f g h)")
    assert str(found).endswith("test.txt: 2 of 4 examples (50.00%); 1 of fewer than 8 words not checked")


def test_no_ngram_reaches_across_documents_or_texts(tmp_path: Path) -> None:
    line = " ".join(LETTERS[:13])
    evaluation = written(tmp_path / "test.txt", [line])
    assert search(evaluation, [[" ".join(LETTERS[:6])], [" ".join(LETTERS[6:13])]])[0].overlapping == 0
    assert search(evaluation, [[" ".join(LETTERS[:6]), " ".join(LETTERS[6:13])]])[0].overlapping == 1
    pair = written(tmp_path / "test.jsonl", [json.dumps({"one": " ".join(LETTERS[:6]), "two": " ".join(LETTERS[6:13])})] * 2)
    (apart,) = search(pair, [[line]])
    assert (apart.checked, apart.too_short, apart.share) == (0, 2, None)
    assert "none of 2 examples can be checked" in str(apart)


def by_definition(lines: list[str], documents: list[Document]) -> int:
    """Number of the lines that overlap, without hashes."""
    text = [f" {' '.join(words_of(' '.join(document)))} " for document in documents]
    count = 0
    for line in lines:
        words = words_of(line)
        length = min(13, len(words))
        spans = [f" {' '.join(words[at : at + length])} " for at in range(len(words) - length + 1)] if length >= 8 else []
        count += any(span in document for span in spans for document in text)
    return count


def test_as_by_definition_on_random_text(tmp_path: Path) -> None:
    draw = random.Random(5)
    documents = [[" ".join(draw.choices(LETTERS[:2], k=40)) for _ in range(2)] for _ in range(12)]
    lines = [" ".join(draw.choices(LETTERS[:2], k=draw.randint(5, 16))) for _ in range(300)]
    (found,) = search(written(tmp_path / "test.txt", lines), documents, chunk=5)
    assert found.too_short == sum(len(line.split()) < 8 for line in lines)
    assert 20 < found.overlapping < found.checked
    assert found.overlapping == by_definition(lines, documents)
    assert len(found.found) == 5


def test_the_first_document_in_the_text_is_told(tmp_path: Path) -> None:
    first, second = " ".join(LETTERS[:13]), " ".join(LETTERS[13:26])
    files = [written(tmp_path / name, [first, second]) for name in ("a.txt", "b.txt")]
    text: list[Document] = [["Nothing."], [second], [first], [first, second]]
    for chunk in (1, 2, 4):
        for found in search(files, text, chunk):
            assert [(each.line, each.document) for each in found.found] == [(2, 2), (1, 3)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.txt").write_text(plain(made_up(60, seed=number)))
    return folder


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    """Four examples: two of the text, one that is not, one that is too short."""
    known = made_up(60, seed=1)
    return written(
        tmp_path / "dev.tsv", ["sentence\tlabel", f"{known[7][0]}\t1", f"{known[9][2]}\t0", f"{'no ' * 9}\t0", "cat\t1"]
    )


def request(text: Path, out: str, **changes: Any) -> dict[str, Any]:
    """Arguments of `prepare`."""
    tokenizer = TokenizerChoice(write_vocabulary(text.parent / "vocab.txt"))
    return {"inputs": (str(text),), "out": text.parent / out, "tokenizer": tokenizer, "progress": Silent()} | changes


def test_the_same_whatever_the_workers(text: Path, evaluation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discern.data.dataset.build.CHUNK_CHARACTERS", 1000)
    against, manifests = EvaluationFiles([evaluation]), []
    for workers in (1, 3):
        build = BuildOptions(workers=workers)
        report = prepare(**request(text, f"data{workers}", build=build, against=against))
        manifests.append((text.parent / f"data{workers}" / "manifest.json").read_bytes())
        alone = check([str(text)], build=build, against=against, progress=Silent())
        assert alone.overlap == report.manifest.overlap
        with_tokenizer = check(
            [str(text)], tokenizer=request(text, "")["tokenizer"], build=build, against=against, progress=Silent()
        )
        assert (with_tokenizer.overlap, with_tokenizer.documents) == (alone.overlap, 120)
    assert manifests[0] == manifests[1]
    assert alone.overlap is not None
    (found,) = alone.overlap
    assert (found.examples, found.checked, found.overlapping, found.share) == (4, 3, 2, 2 / 3)
    places = [(each.line, each.input, each.document) for each in found.found]
    assert places == [(2, str(text / "1.txt"), 8), (3, str(text / "1.txt"), 10)]


def test_what_filters_leave_out_is_not_searched(text: Path, evaluation: Path) -> None:
    (text / "9.txt").write_text("\n".join(["one two three four five six seven eight nine ten"] * 9))
    written(evaluation, ["sentence", "one two three four five six seven eight nine ten", made_up(60, seed=1)[7][0]])
    against, choice = EvaluationFiles([evaluation]), request(text, "")["tokenizer"]
    places = {}
    for filters, tokenizer in (((), None), (("words:50",), None), (("words:1-40",), choice)):
        build = BuildOptions(workers=1, filters=filters)
        found = check([str(text)], tokenizer=tokenizer, build=build, against=against, progress=Silent()).overlap
        assert found is not None
        places[filters] = [(Path(each.input).name, each.document) for each in found[0].found]
    assert places == {(): [("1.txt", 8), ("9.txt", 1)], ("words:50",): [("9.txt", 1)], ("words:1-40",): [("1.txt", 8)]}
    assert prepare(**request(text, "data", build=build, against=against)).manifest.overlap == found


def test_the_manifest_keeps_it_and_the_fingerprint_stays(text: Path, evaluation: Path) -> None:
    without = prepare(**request(text, "data"))
    path = text.parent / "data" / "manifest.json"
    before = path.read_bytes()
    assert b"overlap" not in before
    assert without.values()["overlap"] is None
    again = prepare(**request(text, "data", against=EvaluationFiles([evaluation])))
    assert (again.unchanged, again.repaired) == (True, ())
    assert again.manifest.fingerprint == without.manifest.fingerprint
    assert read_manifest(path.parent).overlap == again.manifest.overlap
    assert again.values()["overlap"][0]["share"] == 2 / 3
    third = prepare(**request(text, "data"))  # not asked for again: what is known is kept
    assert read_manifest(path.parent).overlap == third.manifest.overlap == again.manifest.overlap
    kept = json.loads(path.read_text())
    del kept["overlap"]
    assert kept == json.loads(before)


def test_refused_before_any_work(text: Path, evaluation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discern.data.sources.corpus.Corpus.documents", lambda *_: pytest.fail("the text was read"))
    for against, error, says in (
        (EvaluationFiles([text.parent / "absent"]), DataError, "absent cannot be read"),
        (EvaluationFiles([evaluation], ["sentence1"]), ConfigError, "has no column 'sentence1'; its columns: sentence, label"),
        (EvaluationFiles([evaluation, evaluation]), ConfigError, "is given twice"),
    ):
        with pytest.raises(error, match=says):
            prepare(**request(text, "data", against=against))
        with pytest.raises(error, match=says):
            check([str(text)], corpus=CorpusOptions(), against=against, progress=Silent())
    assert not (text.parent / "data").exists()
