"""The last stages: every document gets its place in a split, and the shards are written, each by a task of its own."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Int

from discern.data.dataset.build import Built, LengthHistogram, in_order, repeated
from discern.data.dataset.manifest import COUNTS_NAME, SPLITS, FileInfo, ShardInfo, SplitInfo, SplitName, Statistics
from discern.data.dataset.writing import HeldoutSplit, Placed, ShardFiles
from discern.data.sources.documents import Problem, ProblemLog
from discern.data.stages.pieces import Pieces
from discern.data.stages.plan import PrepareJob
from discern.data.stages.results import Aside, checked, read_array, result_of, values_of
from discern.data.tokenizer import special_ids, vocab_size
from discern.data.tokenizer.encoding import DIGEST_BYTES, TokenBlock
from discern.storage.files import sync_file, write_file

_PLACED_AT_ONCE = 1 << 12


def shard_name(split: SplitName, number: int) -> str:
    """The name of a shard, and of the file of its documents."""
    return f"{split}-{number:05d}"


class _Places:
    """The documents of a split in order, cut into shards by the rule of `SplitWriter`, with a file for the task of each shard.

    Attributes:
        shards: number of shards so far.
    """

    def __init__(self, folder: Path, split: SplitName, shard_tokens: int) -> None:
        self._folder = folder
        self._split = split
        self._shard_tokens = shard_tokens
        self._room = 0
        self._file: BinaryIO | None = None
        self.shards = 0

    def append(self, numbers: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " n"]) -> None:
        ends = np.cumsum(lengths)
        first = 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, before + self._room, side="right")) if self._file is not None else 0
            if self._file is None or stop <= first:  # a new shard, which takes one document even if that is longer than a shard
                self.close()
                self._file = (self._folder / shard_name(self._split, self.shards)).open("xb")
                self.shards += 1
                self._room = self._shard_tokens
                stop = max(int(np.searchsorted(ends, before + self._room, side="right")), first + 1)
            self._room -= int(ends[stop - 1]) - before
            self._file.write(numbers[first:stop].astype("<i8").tobytes())
            first = stop

    def close(self) -> None:
        if self._file is not None:
            sync_file(self._file)
            self._file.close()


def place(job: PrepareJob, removed: Int[np.ndarray, " R"], aside: Aside) -> None:
    """Decide which documents each shard has. Needs the digests and lengths of the documents, not their tokens.

    Args:
        removed: numbers of the documents that are left out, ascending.
    """
    plan, pieces = job.plan, Pieces(job)
    chooser = HeldoutSplit(plan.build.heldout, plan.build.seed)
    digests, left = np.empty((pieces.num_documents, DIGEST_BYTES), dtype=np.uint8), 0
    characters = sum(found["characters"] for found in pieces.values)
    places = {split: _Places(aside.path, split, plan.build.shard_tokens) for split in SPLITS}

    def put(placed: Placed) -> None:
        for split, block in placed:
            numbers, lengths = block.tokens.reshape(-1, 2).T.astype(np.int64)
            places[split].append(numbers, lengths)

    for index in range(len(plan.pieces)):
        first, stop = pieces.firsts[index : index + 2]
        kept = np.ones(stop - first, dtype=bool)
        kept[removed[np.searchsorted(removed, first) : np.searchsorted(removed, stop)] - first] = False
        characters -= int(read_array(pieces.folders[index], "characters", "<i8")[~kept].sum())
        found = read_array(pieces.folders[index], "digests", "u1", DIGEST_BYTES)[kept]
        digests[left : left + len(found)] = found
        left += len(found)
        numbers, lengths = np.arange(first, stop)[kept], pieces.lengths(index)[kept]
        for begin in range(0, len(numbers), _PLACED_AT_ONCE):
            some = slice(begin, begin + _PLACED_AT_ONCE)
            put(chooser.place(_stand_ins(numbers[some], lengths[some], found[some])))
    put(chooser.finish())
    for split in SPLITS:
        places[split].close()
    aside.values = {
        "shards": [{"split": split, "number": number} for split in SPLITS for number in range(places[split].shards)],
        "duplicates": repeated(digests[:left]),
        "characters": characters,
    }


def _stand_ins(numbers: Int[np.ndarray, " D"], lengths: Int[np.ndarray, " D"], digests: np.ndarray) -> TokenBlock:
    """A block with the documents' digests, but the number and the length of each document in place of its tokens."""
    one = np.ones(len(numbers), dtype=np.int64)
    pairs = np.stack([numbers, lengths], axis=1).astype(np.uint64)
    return TokenBlock(pairs.ravel(), np.ones(2 * len(one), dtype=bool), 2 * one, one, np.asarray(digests))


def make_shard(job: PrepareJob, index: int, aside: Aside) -> None:
    """Write a shard, with the counts of its tokens."""
    placed = result_of(job.folder, "placed")
    found = values_of(placed)["shards"][index]
    name = shard_name(found["split"], found["number"])
    numbers = read_array(placed, name, "<i8")
    counts = np.zeros(vocab_size(job.tokenizer), dtype="<i8")
    documents, sentences, words = LengthHistogram(), LengthHistogram(), 0
    shard = ShardFiles(aside.path, name)
    try:
        for block in Pieces(job).blocks(np.asarray(numbers)):
            shard.append(block)
            words += int(block.word_starts.sum())
            counts += np.bincount(block.tokens, minlength=len(counts))
            documents.add(block.document_lengths)
            sentences.add(block.sentence_lengths)
    except BaseException:
        shard.abandon()
        raise
    info = shard.close()
    aside.write("counts", counts)
    aside.write("lengths", np.stack([documents.to_array(), sentences.to_array()]).astype("<i8"))
    aside.values = {
        "split": found["split"],
        "shard": info.model_dump(mode="json"),
        "words": words,
        "unknown": int(counts[special_ids(job.tokenizer)["unk"]]),
    }


def join(job: PrepareJob, folder: Path) -> Built:
    """Put the shards into the folder of the data set, and add up what the tasks counted."""
    pieces, placed = Pieces(job), values_of(result_of(job.folder, "placed"))
    counts = np.zeros(vocab_size(job.tokenizer), dtype="<i8")
    documents, sentences = LengthHistogram(), LengthHistogram()
    shards: dict[SplitName, list[ShardInfo]] = {split: [] for split in SPLITS}
    sums = Counter[str]()
    for index in range(len(placed["shards"])):
        made_in = result_of(job.folder, "shards", index)
        made = values_of(made_in)
        info = ShardInfo.model_validate(made["shard"])
        for suffix in info.files:
            _link(checked(made_in, f"{info.name}.{suffix}"), folder / f"{info.name}.{suffix}")
        if made["split"] == "train":
            counts += read_array(made_in, "counts", "<i8")
        lengths = np.split(read_array(made_in, "lengths", "<i8"), 2)
        documents.merge(lengths[0])
        sentences.merge(lengths[1])
        shards[made["split"]].append(info)
        sums.update(words=made["words"], unknown=made["unknown"])
        sums.update(documents=info.num_documents, sentences=info.num_sentences, tokens=info.num_tokens)
    raw = counts.tobytes()
    write_file(folder / COUNTS_NAME, raw)
    statistics = Statistics(
        documents=sums["documents"],
        sentences=sums["sentences"],
        tokens=sums["tokens"],
        words=sums["words"],
        unknown_tokens=sums["unknown"],
        unknown_fraction=sums["unknown"] / max(sums["tokens"], 1),
        unknown_causes=_added(pieces, "unknown"),
        tokens_per_word=sums["tokens"] / max(sums["words"], 1),
        duplicates=placed["duplicates"],
        empty_documents=sum(found["empty"] for found in pieces.values),
        characters=placed["characters"],
        bytes_read=sum(found["bytes_read"] for found in pieces.values),
        document_lengths=documents.quantiles(),
        sentence_lengths=sentences.quantiles(),
    )
    splits = {split: SplitInfo.of(shards[split]) for split in SPLITS}
    return Built(
        splits,
        FileInfo(size=len(raw), sha256=hashlib.sha256(raw).hexdigest()),
        statistics,
        filtered=in_order(_added(pieces, "filtered")) if job.plan.build.filters else None,
    )


def _added(pieces: Pieces, name: str) -> Counter[str]:
    """The sums of what all pieces counted under a name."""
    return sum((Counter(found[name]) for found in pieces.values), Counter[str]())


def joined_problems(job: PrepareJob) -> ProblemLog:
    """The problems of the whole input as one reading would have found them, and its notes."""
    log = ProblemLog()
    for found in Pieces(job).values:
        for problem in found["problems"]:
            log.merge(Problem.model_validate(problem))
        for line in found["notes"]:
            log.note(line)
    return log


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb+") as file:
            sync_file(file)
