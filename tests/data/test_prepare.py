"""The whole of `discern prepare` on small text: what is made, what is refused, and that nothing half-made is left."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from discern.data.check import check
from discern.data.dataset.shards import TokenData
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare, warnings_of
from discern.data.sources.documents import CorpusOptions
from discern.data.tokenizer.choice import TokenizerChoice
from discern.data.tokenizer.training import TokenizerKind
from discern.errors import ConfigError, DataError
from discern.progress import Silent
from tests.data.small_text import contents, made_up, plain, tar_of, write_vocabulary
from tests.support import run_python


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of three files and an archive; 240 documents, 20 of them twice."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(plain(made_up(60, seed=number)))
    (folder / "more.tar").write_bytes(tar_of({"a.txt": plain(made_up(40, seed=9)).encode(), "b": plain(made_up(20)).encode()}))
    return folder


def request(text: Path, out: str = "data", **changes: Any) -> dict[str, Any]:
    """Arguments of `prepare`."""
    options = {"heldout": 0.1, "workers": 1} | {key: changes.pop(key) for key in ("heldout", "workers", "seed") if key in changes}
    settings: dict[str, Any] = {
        "inputs": (str(text),),
        "out": text.parent / out,
        "tokenizer": TokenizerChoice(write_vocabulary(text.parent / "vocab.txt")),
        "options": PrepareOptions(**options),
    }
    return settings | changes


run = partial(run_python, "-m", "discern")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_data_set(text: Path) -> None:
    report = prepare(**request(text), progress=Silent())
    data = TokenData.open(text.parent / "data")
    statistics = data.manifest.statistics
    assert report.manifest == data.manifest
    assert (statistics.documents, statistics.sentences, statistics.duplicates) == (240, 960, 20)
    assert statistics.tokens == 960 * 9 == data.split("train").num_tokens + data.split("heldout").num_tokens
    assert statistics.unknown_fraction == 0
    assert statistics.document_lengths["0.5"] == 36
    assert statistics.bytes_read == sum(path.stat().st_size for path in text.iterdir())
    assert 8 < data.manifest.splits["heldout"].num_documents < 45
    assert data.token_counts().sum() == data.split("train").num_tokens
    assert data.manifest.inputs == (str(text),)
    before = data.folder.stat().st_ino
    assert prepare(**request(text, workers=2), progress=Silent()).unchanged
    assert data.folder.stat().st_ino == before
    assert names(text.parent) == ["data", "text", "vocab.txt"]


def test_the_same_bytes_whatever_the_workers(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discern.data.job.CHUNK_CHARACTERS", 2000)
    for workers in (1, 2, 3):
        prepare(**request(text, f"data{workers}", workers=workers), progress=Silent())
    assert contents(text.parent / "data1") == contents(text.parent / "data2") == contents(text.parent / "data3")


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_a_tokenizer_of_its_own(text: Path, kind: TokenizerKind) -> None:
    choice = TokenizerChoice(train=kind, vocab_size=290)
    report = prepare(**request(text, tokenizer=choice), progress=Silent())
    info = report.manifest.tokenizer
    assert info.vocab_size <= 290
    assert info.lowercase == (kind == "wordpiece")
    data = TokenData.open(text.parent / "data")
    first = data.split("train").read(0, int(data.split("train").shards[0].sentence_starts[1])).tolist()
    sentences = {sentence.replace(" ", "") for document in made_up(60) for sentence in document}
    assert data.tokenizer().decode(first).replace(" ", "") in sentences


def test_check_writes_nothing_and_finds_everything(text: Path) -> None:
    (text / "bad.txt").write_bytes(b"Good line.\nbad \xff line\n" * 5)
    (text / "image.png").write_bytes(bytes(300))
    (text / "cut.tar").write_bytes(tar_of({"a": b"x" * 5000})[:2000])
    report = check([str(text)], progress=Silent())
    assert names(text.parent) == ["text"]
    assert report.statistics is None
    assert report.documents == 241
    assert [problem.kind for problem in report.problems] == ["invalid UTF-8, replaced", "file skipped, as it is not text"]
    assert "cut.tar" in report.errors[0]
    vocabulary = TokenizerChoice(write_vocabulary(text.parent / "vocab.txt"))
    with_tokenizer = check([str(text)], tokenizer=vocabulary, progress=Silent())
    assert with_tokenizer.statistics is not None
    assert with_tokenizer.statistics.duplicates == 20
    assert any(line.startswith("20 documents are copies of others") for line in with_tokenizer.advice)
    with pytest.raises(DataError, match=r"cut\.tar"):
        prepare(**request(text), progress=Silent())
    assert not (text.parent / "data").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("\n\n".join(f"Line {number} of a wrapped book," for number in range(40)), "--documents file makes each file"),
        ("\n".join(f"line {number} of a paragraph that is wrapped" for number in range(40)), "0% of the lines end a sentence"),
        ("One. Two. Three. Four. Five. " * 9 + "\n", "a line has 45.0 sentences on average"),
        ("A <b>red</b> cat &amp; a dog.\n" * 9, "of characters are markup"),
        ("\n\n".join(f"Subscribe to our newsletter\nText {number}." for number in range(30)), "newsletter' is in 30 of 30"),
    ],
)
def test_a_check_says_what_a_colleague_would(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "text.txt").write_text(content)
    report = check([str(tmp_path / "text.txt")], progress=Silent())
    assert says in "\n".join(report.advice)


def test_token_ids(text: Path) -> None:
    """A data set of ids is that of the text, where every line is a document: its sentences end at [SEP]."""
    lines = [sentence for document in made_up(30) for sentence in document]
    (text.parent / "lines.txt").write_text("\n".join(lines))
    whole = prepare(**request(text.parent / "lines.txt", "whole", corpus=CorpusOptions("line")), progress=Silent())
    tokenizer = TokenData.open(text.parent / "whole").tokenizer()
    ids = [tokenizer.encode(line).ids for line in lines]
    (text.parent / "ids.jsonl").write_text("".join(json.dumps({"input_ids": each}) + "\n" for each in ids))
    np.save(text.parent / "ids.npy", np.concatenate(ids))
    np.concatenate(ids).astype("<u2").tofile(text.parent / "ids.bin")
    for name in ("ids.jsonl", "ids.npy", "ids.bin"):
        found = prepare(**request(text.parent / name, name[4:], heldout=0), progress=Silent()).manifest
        assert (found.statistics.documents, found.statistics.tokens) == (120, whole.manifest.statistics.tokens)
        split = TokenData.open(text.parent / name[4:]).split("train")
        assert split.read(0, 8).tolist() == ids[0][1:9]
    np.save(text.parent / "wrong.npy", np.array([7, 70_000]))
    with pytest.raises(DataError, match="token id 70000 is beyond the vocabulary"):
        prepare(**request(text.parent / "wrong.npy", "wrong"), progress=Silent())


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("train-00000.tokens", "flipped"),
        ("token-counts.int64", "cut"),
        ("tokenizer.json", "flipped"),
        ("train-00000.words", "missing"),
    ],
)
def test_a_damaged_data_set_is_repaired(text: Path, file: str, damage: str) -> None:
    prepare(**request(text), progress=Silent())
    path = text.parent / "data" / file
    good = path.read_bytes()
    (path.parent / "mine.txt").write_text("keep")
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(good[:20] + bytes([good[20] ^ 1]) + good[21:] if damage == "flipped" else good[:-8])
    report = prepare(**request(text), progress=Silent())
    assert (report.unchanged, report.repaired) == (False, (file,))
    assert path.read_bytes() == good
    assert (path.parent / "mine.txt").exists()
    assert prepare(**request(text), progress=Silent()).unchanged


def test_what_is_not_of_the_data_set_is_never_deleted(text: Path) -> None:
    prepare(**request(text), progress=Silent())
    data = text.parent / "data"
    (data / "mine").mkdir()
    (data / "mine" / "notes.txt").write_text("keep")
    (data / "run.txt").touch()
    with pytest.raises(ConfigError, match=r"also contains mine, run\.txt, which --overwrite would delete\n.*move them away"):
        prepare(**request(text, overwrite=True), progress=Silent())
    assert (data / "mine" / "notes.txt").read_text() == "keep"
    assert TokenData.open(data).manifest.statistics.documents == 240


def test_another_data_set_is_not_overwritten_unless_told(text: Path) -> None:
    first = prepare(**request(text), progress=Silent()).manifest
    with pytest.raises(ConfigError, match=r"different settings \(heldout: 0.1 -> 0.2\)") as error:
        prepare(**request(text, heldout=0.2), progress=Silent())
    assert "--overwrite" in str(error.value)
    (text / "new.txt").write_text("A new document.")
    with pytest.raises(ConfigError, match="made from different text"):
        prepare(**request(text), progress=Silent())
    assert TokenData.open(text.parent / "data").manifest == first
    prepare(**request(text, heldout=0.2, overwrite=True), progress=Silent())
    assert TokenData.open(text.parent / "data").manifest.statistics.documents == 241
    assert names(text.parent) == ["data", "text", "vocab.txt"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_data_set_is_never_replaced(text: Path, overwrite: bool) -> None:
    other = text.parent / "data"
    other.mkdir()
    (other / "thesis.tex").write_text("dear")
    with pytest.raises(ConfigError, match="not a data set"):
        prepare(**request(text, overwrite=overwrite), progress=Silent())
    assert contents(other) == {"thesis.tex": b"dear"}
    with pytest.raises(ConfigError, match="is a file"):
        prepare(**request(text, out="vocab.txt", overwrite=overwrite), progress=Silent())


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"tokenizer": TokenizerChoice()}, ConfigError, "--train-tokenizer"),
        ({"tokenizer": TokenizerChoice(Path("x"), "bpe")}, ConfigError, "--train-tokenizer"),
        ({"tokenizer": TokenizerChoice(Path("x"), vocab_size=5)}, ConfigError, "--vocab-size"),
        ({"tokenizer": TokenizerChoice(train="bpe", vocab_size=100)}, ConfigError, "at least 261"),
        ({"tokenizer": TokenizerChoice(Path("absent"))}, DataError, "tokenizer absent does not exist"),
        ({"inputs": ("absent.txt",)}, DataError, "absent.txt does not exist"),
    ],
)
def test_refused_before_any_work(text: Path, changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        prepare(**request(text, **changes), progress=Silent())
    assert raised.value.hint  # type: ignore[attr-defined]
    assert names(text.parent) == ["text", "vocab.txt"]


def test_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "image").write_bytes(bytes(100))
    (folder / "blank").write_text(" \n\n")
    with pytest.raises(DataError, match=r"contains no text; file skipped, as it is not text: 1 \(.*image"):
        prepare(**request(folder, out="data"), progress=Silent())
    assert names(tmp_path) == ["text", "vocab.txt"]


def test_a_folder_that_cannot_be_made(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    wanted = request(text)
    monkeypatch.setattr("discern.storage.files.create_held", refuse)
    with pytest.raises(DataError, match=r"cannot write .*data: Read-only file system"):
        prepare(**wanted, progress=Silent())
    assert names(text.parent) == ["text", "vocab.txt"]


def test_a_full_disk(text: Path) -> None:
    """A limit on the size of files stands in for it: a write fails in the middle."""
    vocabulary = write_vocabulary(text.parent / "vocab.txt")
    command = [sys.executable, "-m", "discern", "prepare", text, "--out", text.parent / "data", "--tokenizer", vocabulary]
    limited = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000)); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", limited, *map(str, command)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search("cannot write .*data: File too large", done.stderr)
    assert names(text.parent) == ["text", "vocab.txt"]


def test_the_command(text: Path) -> None:
    arguments = ("prepare", text, "--out", text.parent / "data", "--tokenizer", write_vocabulary(text.parent / "v"))
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wanted = "documents tokens train_tokens heldout_tokens vocab_size unknown_fraction duplicates seconds tokens_per_second"
    assert set(wanted.split()) <= set(found)
    assert found["tokens"] == found["train_tokens"] + found["heldout_tokens"] == 8640
    again = run(*arguments, "--workers", 1)
    assert "with identical content" in again.stdout
    assert "discern pretrain" in again.stdout


def test_torch_is_not_loaded_for_it() -> None:
    for module, absent in (("discern.cli.main", "numpy"), ("discern.data.prepare", "torch")):
        program = f"import sys, {module}; sys.exit('{absent}' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_command_reads_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "input").write_text(plain(made_up(5)))
    options = ("--out", tmp_path / "data", "--json")
    with (tmp_path / "input").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        done = run("prepare", "-", "--tokenizer", write_vocabulary(tmp_path / "vocab.txt"), *options)
    assert json.loads(done.stdout)["documents"] == 5
    done = run("prepare", "-", "--train-tokenizer", "bpe", *options, "--overwrite")
    assert done.returncode == 2
    assert "read twice" in done.stderr


def test_the_command_checks(text: Path) -> None:
    (text.parent / "good.txt").write_text(plain(made_up(40, sentences=20)))
    np.save(text.parent / "ids.npy", [[5, 6], [7, 8]])
    for name, *tokenizer in (["good.txt"], ["ids.npy", "--tokenizer", write_vocabulary(text.parent / "vocab.txt")]):
        good = run("prepare", text.parent / name, "--check", *tokenizer)
        assert (good.returncode, "no problems found" in good.stdout) == (0, True)
    (text / "cut.gz").write_bytes(b"\x1f\x8b\x08")
    bad = run("prepare", text, "--check", "--json")
    assert bad.returncode == 1
    assert "cut.gz" in json.loads(bad.stdout)["errors"][0]


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Peak memory of the parent, over four times the text."""
    measure = (
        "import re, sys; from discern.cli.main import main\n"  # ru_maxrss would begin at the peak of this process
        "try: main()\nfinally: print(*re.findall(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read()), file=sys.stderr)"
    )
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    peaks = []
    for times in (1, 4):
        (tmp_path / f"text{times}").write_text(plain(made_up(8000)) * times)
        command = [
            "prepare",
            tmp_path / f"text{times}",
            "--out",
            tmp_path / f"{times}",
            "--tokenizer",
            vocabulary,
            "--workers",
            1,
        ]
        done = subprocess.run([sys.executable, "-c", measure, *map(str, command)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        peaks.append(int(done.stderr.split()[-1]))
    assert peaks[1] < peaks[0] * 1.25


def test_a_small_heldout_part_and_many_unknown_tokens_are_warned_of(text: Path) -> None:
    assert warnings_of(prepare(**request(text), progress=Silent()).manifest) == []
    (warning,) = warnings_of(prepare(**request(text, "few", heldout=0.001), progress=Silent()).manifest)
    assert warning.startswith("the held-out split has only ")
    assert "hold out more documents" in warning
    strange = text.parent / "strange.txt"
    strange.write_text("☂ ☃\n\n☂ ★\n\n" * 20)
    unknown, *_ = warnings_of(prepare(**request(strange, "strange"), progress=Silent()).manifest)
    assert unknown.startswith("80 of 80 tokens (100%) are unknown to the vocabulary")
    assert "unknown are '☂' (U+2602): 50%, '☃' (U+2603): 25%, '★' (U+2605): 25%; " in unknown
    assert "--train-tokenizer bpe" in unknown


def test_copies_that_fill_the_held_out_part_are_warned_of(text: Path) -> None:
    copies = text.parent / "copies.txt"
    copies.write_text("a red cat.\n\n" * 300 + "the old dog.\n")
    (warning,) = warnings_of(prepare(**request(copies, seed=4, heldout=0.01), progress=Silent()).manifest)
    assert warning.startswith("300 of 301 documents (99.7% of the tokens) are held out, although --heldout is 0.01")
    assert "299 documents are copies" in warning
    assert "--near-duplicates" in warning


def test_why_nothing_is_held_out(text: Path) -> None:
    (warning,) = warnings_of(prepare(**request(text, heldout=0), progress=Silent()).manifest)
    assert "give a --heldout fraction above 0" in warning
    one = text.parent / "one.txt"
    for content, reason in (
        ("a red cat.\n", "the text is a single document"),
        ("a red cat.\n\n" * 9, "all documents are copies of one"),
    ):
        one.write_text(content)
        (warning,) = warnings_of(prepare(**request(one, reason), progress=Silent()).manifest)
        assert f"because {reason}: use more text, or with --documents line" in warning
