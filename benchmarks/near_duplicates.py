"""Recall and precision of near-duplicates planted in Wikipedia, and the cost of finding them as the text grows.

    python benchmarks/near_duplicates.py WIKIPEDIA_ARCHIVE [--vocabulary VOCAB.TXT] [--files 8 32 100] [--libraries]

WIKIPEDIA_ARCHIVE is a tar of WikiExtractor files. Planted: for each share of edits, copies of articles in which that share of
the words is replaced by other words of the article. A pair counts as similar if the Jaccard similarity of its word 5-grams,
computed exactly, is at least the threshold. `--libraries` compares the signatures with those of the packages rensa and
datasketch instead.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from discern.data.curation.contamination import words_of
from discern.data.curation.near_duplicates import HASHES, NGRAM_WORDS, banding, clusters, links_of_band, sign
from discern.data.job import chunks_of
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions, ProblemLog

SIMILARITY = 0.8
SHARES = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)
ARTICLES_PER_SHARE = 60
ROUNDS = 5


def grams(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[place : place + NGRAM_WORDS]) for place in range(len(words) - NGRAM_WORDS + 1)}


def edited(words: list[str], share: float, draw: random.Random) -> list[str]:
    """The words with a share of them replaced by others of the same text, each edit at a place of its own."""
    changed = list(words)
    for place in draw.sample(range(len(words)), max(1, round(share * len(words)))):
        changed[place] = draw.choice(words)
    return changed


def ngram_sets(documents: Sequence[list[str]]) -> list[list[str]]:
    texts = [words_of(" ".join(document)) for document in documents]
    return [[" ".join(words[at : at + NGRAM_WORDS]) for at in range(len(words) - NGRAM_WORDS + 1)] for words in texts]


def with_rensa(documents: Sequence[list[str]]) -> np.ndarray:
    from rensa import RMinHash

    return np.array(RMinHash.digest_matrix_from_token_sets(ngram_sets(documents), HASHES, 0).to_rows(), dtype=np.uint32)


def with_datasketch(documents: Sequence[list[str]]) -> np.ndarray:
    from datasketch import MinHash

    sets = [[ngram.encode() for ngram in ngrams] for ngrams in ngram_sets(documents)]
    return np.array([found.hashvalues for found in MinHash.generator(sets, num_perm=HASHES)], dtype=np.uint32)


WAYS = {"numpy": sign, "rensa": with_rensa, "datasketch": with_datasketch}


def kernels(folder: Path) -> None:
    """Print processor seconds per megabyte of text for each way to compute signatures, in rounds that alternate."""
    documents = list(Corpus([str(folder)], CorpusOptions()).documents(ProblemLog()))
    size = sum(len(line.encode()) for document in documents for line in document) / 1e6
    chunks = list(chunks_of(documents))
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(ROUNDS + 1):
        for name, way in WAYS.items():
            began = time.process_time()
            for chunk in chunks:
                way(chunk)
            if turn:  # words are remembered from the first round on
                seconds[name].append(time.process_time() - began)
    print(f"{size:.1f} MB of text, {len(documents):,} documents, milliseconds per MB (least to most) and documents per second")
    for name, found in seconds.items():
        middle, least, most = (value / size * 1e3 for value in (statistics.median(found), min(found), max(found)))
        print(f"| {name} | {middle:.0f} ({least:.0f} to {most:.0f}) | {len(documents) / statistics.median(found):,.0f} |")


def planted(folder: Path, sign: Callable[[Sequence[list[str]]], np.ndarray] = sign) -> None:
    """Print recall and precision by share of edits."""
    options = CorpusOptions()
    texts = [words_of(" ".join(document)) for document in Corpus([str(folder)], options).documents(ProblemLog())]
    articles = [words for words in texts if len(words) >= 100]
    draw = random.Random(0)
    chosen = draw.sample(range(len(articles)), len(SHARES) * ARTICLES_PER_SHARE)
    copies = [edited(articles[at], SHARES[number % len(SHARES)], draw) for number, at in enumerate(chosen)]
    everything = articles + copies
    signatures = [sign([[" ".join(words)] for words in everything])]
    bands, rows = banding(SIMILARITY)
    links = [links_of_band(signatures, band, SIMILARITY) for band in range(bands)]
    found = set(map(tuple, np.concatenate(links).tolist()))
    removed = set(clusters(links, len(everything))[0].tolist())
    print(f"{len(articles):,} articles, {len(copies):,} copies; similarity {SIMILARITY}; {bands} bands of {rows} rows")
    print("| words edited | mean Jaccard | copies at or above 0.8 | of those removed | of the others removed |")
    print("|---|---|---|---|---|")
    for index, share in enumerate(SHARES):
        similar = [0, 0]
        others = [0, 0]
        total = 0.0
        for number in range(index, len(copies), len(SHARES)):
            one, other = grams(articles[chosen[number]]), grams(copies[number])
            jaccard = len(one & other) / len(one | other)
            total += jaccard
            counted = similar if jaccard >= SIMILARITY else others
            counted[0] += 1
            counted[1] += len(articles) + number in removed
        print(f"| {share:.0%} | {total / ARTICLES_PER_SHARE:.2f} | {similar[0]} | {similar[1]} | {others[1]} of {others[0]} |")
    exact = [
        len(grams(everything[a]) & grams(everything[b])) / len(grams(everything[a]) | grams(everything[b])) for a, b in found
    ]
    far = sum(similarity < SIMILARITY - 0.1 for similarity in exact)
    print(
        f"links: {len(exact):,}; exact Jaccard at least {SIMILARITY}: {sum(s >= SIMILARITY for s in exact):,}; "
        f"least {min(exact):.3f}; below {SIMILARITY - 0.1:.1f}: {far}"
    )
    print(f"articles removed that are no copies: {len([n for n in removed if n < len(articles)])}")


def cost(archive: Path, vocabulary: Path, files: int) -> None:
    """Print seconds of processor and memory of `prepare`, without and with --near-duplicates."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = unpack(archive, folder / "text", files)
        for options in ([], ["--near-duplicates", str(SIMILARITY)]):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            program = [sys.executable, "-m", "discern", "prepare", folder / "text", "--out", folder / f"data{len(options)}"]
            program += ["--tokenizer", vocabulary, "--workers", "1", "--json", *options]
            done = subprocess.run(list(map(str, program)), check=True, capture_output=True, text=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            made = json.loads(done.stdout)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(
                f"| {files} | {size / 1e6:.1f} | {made['documents']:,} | {' '.join(options) or 'without'} | {seconds:.1f} | "
                f"{made['near_duplicates']} | {after.ru_maxrss / 1024:,.0f} |",
                flush=True,
            )


def unpack(archive: Path, folder: Path, files: int) -> int:
    """Unpack the first files of an archive; returns their size in bytes."""
    folder.mkdir()
    size = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and files:
                content = tar.extractfile(member)
                assert content is not None
                size += (folder / Path(member.name).name).write_bytes(content.read())
                files -= 1
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--vocabulary", type=Path)
    parser.add_argument("--files", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--libraries", action="store_true", help="Compare the signatures of rensa, datasketch and numpy.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        unpack(options.archive, Path(name) / "text", 10)
        for way, sign_documents in WAYS.items() if options.libraries else [("numpy", sign)]:
            print(way)
            planted(Path(name) / "text", sign_documents)
        if options.libraries:
            kernels(Path(name) / "text")
    if options.libraries or options.vocabulary is None:
        return
    print("| files | MB | documents | near-duplicates | processor seconds | removed | MiB, largest so far |")
    print("|---|---|---|---|---|---|---|")
    for files in options.files:
        cost(options.archive, options.vocabulary, files)


if __name__ == "__main__":
    main()
