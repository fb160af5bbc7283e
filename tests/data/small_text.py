"""Text made up for the tests, and ways to wrap it."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions, Document, ProblemLog

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "the",
    "a",
    "red",
    "blue",
    "small",
    "old",
    "cat",
    "dog",
    "bird",
    "house",
    "tree",
    "river",
    "sees",
    "finds",
    "likes",
    "leaves",
    "near",
    "under",
    "over",
    "and",
    "then",
    "quietly",
]
LETTERS = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]


def write_vocabulary(path: Path, *, leave_out: str = "") -> Path:
    """A vocab.txt of lower-case words, letters and their continuations."""
    entries = [*SPECIALS, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS), ".", ",", "[", "]", "'"]
    path.write_text("".join(f"{entry}\n" for entry in dict.fromkeys(entries) if entry != leave_out), encoding="utf-8")
    return path


def made_up(documents: int, seed: int = 0, sentences: int = 4) -> list[list[str]]:
    """Documents of sentences of eight words."""
    draw = random.Random(seed)
    return [[" ".join(draw.choices(WORDS, k=8)) + "." for _ in range(sentences)] for _ in range(documents)]


def plain(documents: list[list[str]]) -> str:
    """Documents parted by blank lines."""
    return "\n\n".join("\n".join(document) for document in documents) + "\n"


def tar_of(members: dict[str, bytes]) -> bytes:
    """A tar archive with these regular files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return buffer.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    """The content of each file of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read(*inputs: object, options: CorpusOptions | None = None, problems: ProblemLog | None = None) -> list[Document]:
    """Every document of the inputs."""
    corpus = Corpus([str(item) for item in inputs], options or CorpusOptions())
    return list(corpus.documents(problems if problems is not None else ProblemLog()))
