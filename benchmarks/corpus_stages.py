"""Processor time, memory and bytes of each stage of `discern prepare --near-duplicates`, at several sizes.

    python benchmarks/corpus_stages.py text WIKIPEDIA_ARCHIVE... --vocabulary VOCAB.TXT --files 18 75 300
    python benchmarks/corpus_stages.py slice --documents 31250000
    python benchmarks/corpus_stages.py clusters --pairs 25000000
    python benchmarks/corpus_stages.py places --documents 4000000

`text` runs each stage in a process of its own, on the first files of the archives (tars of WikiExtractor files), one task after
the other. `slice` and `clusters` run a task of the size that it has for a terabyte, on made-up keys and pairs; `places` places a
part of as many documents.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from discern.data.curation.near_duplicates import HASHES, Banding, clusters, distinct_pairs, links
from discern.data.dataset.manifest import SPLITS

SIMILARITY = 0.8
STAGES = ("start", "pieces", "buckets", "clusters", "placed", "shards")


def unpack(archives: Sequence[Path], folder: Path, files: int) -> int:
    """Unpack the first files of several archives; returns their size in bytes."""
    folder.mkdir()
    members = (content for archive in archives for content in contents(archive))
    return sum((folder / f"{number:05d}").write_bytes(content) for number, content in zip(range(files), members, strict=False))


def contents(archive: Path) -> Iterator[bytes]:
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile():
                found = tar.extractfile(member)
                assert found is not None
                yield found.read()


def run_stage(work: Path, stage: str) -> None:
    """Run the tasks of a stage in this process."""
    from discern.data.stages.duplicates import num_buckets
    from discern.data.stages.plan import job_of_task, read_plan
    from discern.data.stages.results import result_of, values_of
    from discern.data.stages.tasks import perform

    plan = read_plan(work)
    assert plan is not None
    counts = {"start": 0, "pieces": len(plan.pieces), "clusters": 1, "placed": 1}
    if stage == "buckets":
        counts[stage] = num_buckets(job_of_task(str(work), plan.fingerprint))
    if stage == "shards":
        counts[stage] = len(values_of(result_of(work, "placed"))["shards"])
    for index in range(counts[stage]):
        perform(str(work), plan.fingerprint, (stage, index))  # type: ignore[arg-type]


def measured(*arguments: object) -> tuple[float, float, float]:
    """Processor seconds, seconds and largest memory in MiB of a program."""
    began = time.monotonic()
    with subprocess.Popen(list(map(str, arguments)), stdout=subprocess.DEVNULL) as running:
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    if running.returncode:
        sys.exit(f"{arguments} failed")
    return used.ru_utime + used.ru_stime, time.monotonic() - began, used.ru_maxrss / 1024


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0


def text(options: argparse.Namespace) -> None:
    """Print a line for each stage and size, and how the time grows."""
    print("| files | MB | stage | processor seconds | seconds | MiB | MB written | load |")
    print("|---|---|---|---|---|---|---|---|")
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    sizes = []
    for files in options.files:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            sizes.append(unpack(options.archives, folder / "text", files))
            program = [sys.executable, "-m", "discern", "prepare", folder / "text", "--out", folder / "data"]
            program += ["--tokenizer", options.vocabulary, "--near-duplicates", SIMILARITY]
            measured(*program, "--part", "999999/1000000")  # an empty share: writes the plan
            work = folder / ".data.parts"
            for stage in STAGES:
                processor, wall, memory = measured(sys.executable, __file__, "stage", work, stage)
                seconds[stage].append(processor)
                print(
                    f"| {files} | {sizes[-1] / 1e6:.1f} | {stage} | {processor:.2f} | {wall:.1f} | {memory:.0f} | "
                    f"{size_of(work / stage) / 1e6:.2f} | {os.getloadavg()[0]:.1f} |",
                    flush=True,
                )
            for kind in ("signatures", "bands", "sections", "links"):
                print(f"{kind}: {sum(path.stat().st_size for path in work.rglob(kind)) / 1e6:.2f} MB", flush=True)
    for stage in STAGES[1:] if sizes[-1] > sizes[0] else ():
        first, last = (seconds[stage][at] - seconds["start"][at] for at in (0, -1))
        if first > 0 and last > 0:
            print(f"{stage}: grows with the power {math.log(last / first) / math.log(sizes[-1] / sizes[0]):.2f} of the text")


def one_slice(options: argparse.Namespace) -> None:
    """Print what a task of the buckets costs: sorting its keys, and comparing those that are equal."""
    draw = np.random.default_rng(0)
    count, rows = options.documents, min(options.documents, 1 << 20)
    signatures = draw.integers(0, 1 << 32, (rows, HASHES), dtype=np.uint32)
    keys = draw.integers(1, 1 << 63, count, dtype=np.uint64)
    equal = int(0.1 * SIMILARITY ** Banding.of(SIMILARITY).rows * count)
    keys[-equal:] = keys[:equal]
    numbers = np.arange(count)
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    pairs = links(keys, numbers, lambda some: signatures[some % (count - equal) % rows], SIMILARITY)
    after = resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"slice: {count:,} documents, {equal:,} pairs of equal keys: {time.process_time() - began:.1f} processor seconds, "
        f"{before.ru_maxrss / 1024:.0f} MiB before, {after.ru_maxrss / 1024:.0f} MiB at most; {len(pairs):,} links"
    )


def all_clusters(options: argparse.Namespace) -> None:
    """Print what the task of the clusters costs, in which every pair is found in several bands."""
    draw = np.random.default_rng(0)
    documents = 10 * options.pairs
    firsts = draw.integers(0, documents, options.pairs)
    pairs = np.sort(np.stack([firsts, draw.integers(0, documents, options.pairs)], axis=1), axis=1)
    banding = Banding.of(SIMILARITY)
    began, merges, raw = time.process_time(), 0, 0
    distinct, more = np.zeros((0, 2), dtype=np.int64), [np.zeros((0, 2), dtype=np.int64)]
    for _ in range(options.buckets):
        share = SIMILARITY**banding.rows * banding.bands / options.buckets
        more.append(pairs[draw.integers(0, len(pairs), int(share * len(pairs)))])
        raw += len(more[-1])
        if sum(map(len, more)) > len(distinct):
            distinct, more, merges = distinct_pairs([distinct, *more]), [], merges + 1
    distinct = distinct_pairs([distinct, *more])
    joined = time.process_time()
    found = clusters(distinct)
    print(
        f"clusters: {raw:,} links in {options.buckets} buckets, {len(distinct):,} distinct, joined in {merges + 1} rounds in "
        f"{joined - began:.1f} processor seconds; {len(found.sizes):,} clusters in {time.process_time() - joined:.1f} more; "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most"
    )


def all_places(options: argparse.Namespace) -> None:
    """Print what the task of the places costs, without reading the digests."""
    from discern.data.dataset.build import repeated
    from discern.data.dataset.writing import HeldoutSplit
    from discern.data.stages.shards import _PLACED_AT_ONCE, _Places, _stand_ins
    from discern.data.tokenizer.encoding import DIGEST_BYTES

    digests = np.frombuffer(np.random.default_rng(0).bytes(options.documents * DIGEST_BYTES), dtype=np.uint8).copy()
    digests = digests.reshape(-1, DIGEST_BYTES)
    began, chooser = time.process_time(), HeldoutSplit(0.01, 0)
    with tempfile.TemporaryDirectory() as name:
        places = {split: _Places(Path(name), split, 1 << 27) for split in SPLITS}
        for first in range(0, len(digests), _PLACED_AT_ONCE):
            found = digests[first : first + _PLACED_AT_ONCE]
            numbers = np.arange(first, first + len(found))
            for split, block in chooser.place(_stand_ins(numbers, np.full(len(found), 1000), found)):
                chosen, lengths = block.tokens.reshape(-1, 2).T.astype(np.int64)
                places[split].append(chosen, lengths)
        placed = time.process_time()
        repeated(digests)
        print(
            f"places: {len(digests):,} documents placed in {placed - began:.1f} processor seconds, "
            f"copies counted in {time.process_time() - placed:.1f}; "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most"
        )
        for each in places.values():
            each.close()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = asked.add_subparsers(required=True)
    of_text = kinds.add_parser("text")
    of_text.add_argument("archives", type=Path, nargs="+")
    of_text.add_argument("--vocabulary", type=Path, required=True)
    of_text.add_argument("--files", type=int, nargs="+", default=[18, 75, 300])
    of_text.set_defaults(run=text)
    of_stage = kinds.add_parser("stage")
    of_stage.add_argument("work", type=Path)
    of_stage.add_argument("stage", choices=STAGES)
    of_stage.set_defaults(run=lambda options: run_stage(options.work, options.stage))
    of_slice = kinds.add_parser("slice")
    of_slice.add_argument("--documents", type=int, default=31_250_000)
    of_slice.set_defaults(run=one_slice)
    of_clusters = kinds.add_parser("clusters")
    of_clusters.add_argument("--pairs", type=int, default=25_000_000)
    of_clusters.add_argument("--buckets", type=int, default=168)
    of_clusters.set_defaults(run=all_clusters)
    of_places = kinds.add_parser("places")
    of_places.add_argument("--documents", type=int, default=4_000_000)
    of_places.set_defaults(run=all_places)
    options = asked.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
