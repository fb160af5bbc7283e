"""Make the files by which `recipes.py` judges its trials.

    python benchmarks/judge_data.py $DISCERN_TEST_DATA --out FOLDER [--text wikipedia-en/AC.tar.xz] [--sentences 1000]

Writes into FOLDER, from text and tasks on which no trial may be trained:

- `sentences.txt`: one sentence of 40 to 200 characters from the middle of each of the first documents of the text;
- `blimp/`: the last 40 pairs of each paradigm (final scores are of the first);
- `tasks/chunk/`: the training file of CoNLL-2000; its last 1,000 sentences become the test file;
- `tasks/stsb/`, `tasks/qnli/`, `tasks/sst2/` and `tasks/cola/`: these tasks of GLUE as they are.

Prints the SHA-256 of `sentences.txt`: nats per character can be compared only on the same sentences.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions, ProblemLog

PAIRS = 40
TEST_SENTENCES = 1000
SHORTEST, LONGEST = 40, 200  # characters
GLUE = {"stsb": "STS-B", "qnli": "QNLI", "sst2": "SST-2", "cola": "CoLA"}
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"“(]?[A-Z])")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--text", type=Path, default=Path("wikipedia-en/AC.tar.xz"), help="text in the data folder")
    parser.add_argument("--sentences", type=int, default=1000)
    asked = parser.parse_args()
    found = list(islice(sentences(asked.data / asked.text), asked.sentences))
    if len(found) < asked.sentences:
        parser.error(f"{asked.text} has {len(found):,} documents with a sentence to take; asked for {asked.sentences:,}")
    asked.out.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{sentence}\n" for sentence in found)
    (asked.out / "sentences.txt").write_text(content, encoding="utf-8")
    minimal_pairs(asked.data / "blimp", asked.out / "blimp")
    chunks(asked.data / "conll2000" / "train.txt", asked.out / "tasks" / "chunk")
    for task, folder in GLUE.items():
        shutil.copytree(
            asked.data / "glue" / folder, asked.out / "tasks" / task, copy_function=shutil.copyfile, dirs_exist_ok=True
        )
    print(f"sentences.txt: {len(found):,} sentences, {hashlib.sha256(content.encode()).hexdigest()}")


def sentences(text: Path) -> Iterator[str]:
    """The middle one of the sentences of each document that are neither short nor long."""
    for document in Corpus([str(text)], CorpusOptions()).documents(ProblemLog()):
        parts = [part for line in document for part in SENTENCE_END.split(line.strip())]
        fitting = [part for part in parts if SHORTEST <= len(part) <= LONGEST and part.endswith((".", "!", "?"))]
        if fitting:
            yield fitting[len(fitting) // 2]


def minimal_pairs(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in sorted(source.glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (target / path.name).write_text("".join(lines[-PAIRS:]), encoding="utf-8")


def chunks(train: Path, target: Path) -> None:
    found = train.read_text(encoding="utf-8").strip().split("\n\n")
    target.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", found[:-TEST_SENTENCES]), ("test", found[-TEST_SENTENCES:])):
        (target / f"{name}.txt").write_text("\n\n".join(part) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
