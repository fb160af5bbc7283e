"""Count the test examples whose text occurs in the text that a model was pre-trained on.

    python benchmarks/contamination.py TEXT... --tests $DISCERN_TEST_DATA [--words 13] [--json]

TEXT: files as for `discern prepare`. An example counts as seen if `--words` words in a row of it occur in TEXT, ignoring case and
punctuation; shorter texts (at least 6 words) if they occur as a whole. Checks what is evaluated here: the dev files of CoLA,
SST-2, QNLI, STS-B, MRPC and RTE, the test file of CoNLL-2000, and both sentences of BLiMP's pairs.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions, ProblemLog

SHORTEST = 6
WORD = re.compile(r"\w+")
# Columns of the texts in the dev files of GLUE; CoLA's has no header.
GLUE = {
    "SST-2": ("sentence",),
    "QNLI": ("question", "sentence"),
    "STS-B": ("sentence1", "sentence2"),
    "MRPC": ("#1 String", "#2 String"),
    "RTE": ("sentence1", "sentence2"),
}


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def examples(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Data set and texts of each example."""
    for name, columns in GLUE.items():
        with (folder / "glue" / name / "dev.tsv").open(encoding="utf-8-sig") as file:
            for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                yield name, [row[column] or "" for column in columns]
    for line in (folder / "glue" / "CoLA" / "dev.tsv").read_text(encoding="utf-8").splitlines():
        yield "CoLA", [line.split("\t")[3]]
    for sentence in (folder / "conll2000" / "test.txt").read_text(encoding="utf-8").strip().split("\n\n"):
        yield "CoNLL-2000", [" ".join(line.split()[0] for line in sentence.splitlines())]
    for path in sorted((folder / "blimp").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            pair = json.loads(line)
            yield "BLiMP", [pair["sentence_good"], pair["sentence_bad"]]


def spans(words: list[str], length: int) -> Iterable[tuple[str, ...]]:
    """All runs of `length` words, or the whole of a shorter text."""
    if len(words) < SHORTEST:
        return ()
    size = min(length, len(words))
    return (tuple(words[start : start + size]) for start in range(len(words) - size + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+")
    parser.add_argument("--tests", required=True, type=Path, help="folder with glue, conll2000 and blimp")
    parser.add_argument("--words", type=int, default=13)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()

    owners: dict[tuple[str, ...], set[tuple[str, int]]] = {}
    totals: dict[str, int] = {}
    for name, texts in examples(asked.tests):
        number = totals[name] = totals.get(name, 0) + 1
        for text in texts:
            for span in spans(words_of(text), asked.words):
                owners.setdefault(span, set()).add((name, number))
    # Two words in a row are looked up first: few places of the text begin like a test example.
    starts: dict[tuple[str, str], set[int]] = {}
    for span in owners:
        starts.setdefault((span[0], span[1]), set()).add(len(span))

    seen: set[tuple[str, int]] = set()
    for document in Corpus(asked.text, CorpusOptions()).documents(ProblemLog()):
        words = words_of(" ".join(document))
        for place, pair in enumerate(itertools.pairwise(words)):
            for size in starts.get(pair, ()):
                seen |= owners.get(tuple(words[place : place + size]), set())
    counts = {name: sum(owner == name for owner, _ in seen) for name in totals}
    if asked.json:
        print(json.dumps({name: {"seen": counts[name], "examples": totals[name]} for name in totals}))
        return
    for name, total in totals.items():
        print(f"{name:12} {counts[name]:6,} of {total:7,}  {100 * counts[name] / total:.2f} %")


if __name__ == "__main__":
    main()
