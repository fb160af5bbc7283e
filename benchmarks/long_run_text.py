"""Make the two texts on which `examples/models/modern-cased` was trained further.

    python benchmarks/long_run_text.py ARCHIVE ... --out FOLDER [--heldout DATA]

Writes into FOLDER:

- `text/`: every document, one in five of them lower-cased;
- `sentences/`: every other document, cut into documents of one to four sentences, one in four of them lower-cased.

Documents that the data set `--heldout` holds out keep their case, so that `discern prepare` with the same `--heldout` fraction
holds them out again, and are not cut into sentences.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from judge_data import SENTENCE_END

from discern.data.dataset.shards import TokenData
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions, ProblemLog

DOCUMENTS_PER_FILE = 500
LOWERCASED_DOCUMENTS = 5  # one in so many
LOWERCASED_PIECES = 0.25
SENTENCES = (1, 1, 2, 3, 4)  # of a piece, equally likely
FIRST_TOKENS = 20  # by which a held-out document is recognized
FIRST_CHARACTERS = 600  # hold at least as many tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", metavar="ARCHIVE", help="text, as `discern prepare` reads it")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--heldout", type=Path, metavar="DATA", help="data set of the same text")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    is_heldout = heldout_test(asked.heldout) if asked.heldout else lambda _: False
    chance = random.Random(asked.seed)
    for kind in ("text", "sentences"):
        (asked.out / kind).mkdir(parents=True, exist_ok=True)
        for old in (asked.out / kind).glob("*.txt"):
            old.unlink()
    counts = dict.fromkeys(("documents", "lower-cased", "held out", "pieces"), 0)
    for number, lines in enumerate(Corpus(asked.archives, CorpusOptions()).documents(ProblemLog())):
        lines = [line.strip() for line in lines if line.strip()]
        text = "\n".join(lines)
        heldout = is_heldout(text)
        lowercased = not heldout and one_in(LOWERCASED_DOCUMENTS, text)
        name = f"{number // DOCUMENTS_PER_FILE:04d}.txt"
        append(asked.out / "text" / name, [text.lower() if lowercased else text])
        cut = list(pieces(lines, chance)) if number % 2 == 0 and not heldout else []
        append(asked.out / "sentences" / name, cut)
        for key, more in zip(counts, (1, lowercased, heldout, len(cut)), strict=True):
            counts[key] += more
    print(", ".join(f"{count:,} {name}" for name, count in counts.items()))


def heldout_test(folder: Path) -> Callable[[str], bool]:
    """Whether a text begins with the tokens of a held-out document of the data set."""
    data = TokenData.open(folder)
    tokenizer, split = data.tokenizer(), data.split("heldout")
    beginnings = set()
    for shard in split.shards:
        for start, end in pairwise(shard.document_starts):
            first = shard.first_token + int(start)
            beginnings.add(tuple(split.read(first, first + min(FIRST_TOKENS, int(end - start))).tolist()))

    def test(text: str) -> bool:
        found = tokenizer.encode(text[:FIRST_CHARACTERS], add_special_tokens=False).ids
        return tuple(found[:FIRST_TOKENS]) in beginnings

    return test


def one_in(number: int, text: str) -> bool:
    """True for one text in so many, by a hash of its first 200 characters."""
    return int(hashlib.sha256(text[:200].encode()).hexdigest()[:8], 16) % number == 0


def pieces(lines: list[str], chance: random.Random) -> Iterator[str]:
    """One to four complete sentences at a time."""
    sentences = [part for line in lines for part in SENTENCE_END.split(line) if part.endswith((".", "!", "?"))]
    at = 0
    while at < len(sentences):
        number = chance.choice(SENTENCES)
        piece = " ".join(sentences[at : at + number])
        at += number
        yield piece.lower() if chance.random() < LOWERCASED_PIECES else piece


def append(path: Path, documents: list[str]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{document}\n\n" for document in documents)


if __name__ == "__main__":
    main()
