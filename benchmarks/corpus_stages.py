"""Processor time, memory and bytes of each stage of `discern prepare --near-duplicates`, at several sizes.

    python benchmarks/corpus_stages.py text WIKIPEDIA_ARCHIVE... --vocabulary VOCAB.TXT --files 18 75 300
    python benchmarks/corpus_stages.py band --documents 4000000
    python benchmarks/corpus_stages.py clusters --pairs 25000000
    python benchmarks/corpus_stages.py places --documents 4000000

`text` runs each stage in a process of its own, on the first files of the archives (tars of WikiExtractor files), one task after
the other. `band`, `clusters` and `places` run a task on made-up signatures, pairs
and documents.
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

from discern.data.curation.near_duplicates import HASHES, Banding, find_near_duplicates, links_of_band
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
            for kind in ("signatures", "links"):
                print(f"{kind}: {sum(path.stat().st_size for path in work.rglob(kind)) / 1e6:.2f} MB", flush=True)
    for stage in STAGES[1:] if sizes[-1] > sizes[0] else ():
        first, last = (seconds[stage][at] - seconds["start"][at] for at in (0, -1))
        if first > 0 and last > 0:
            print(f"{stage}: grows with the power {math.log(last / first) / math.log(sizes[-1] / sizes[0]):.2f} of the text")


def one_band(options: argparse.Namespace) -> None:
    """Print what the links of a band cost: sorting its keys, and comparing the documents with equal ones."""
    draw = np.random.default_rng(0)
    signatures = draw.integers(0, 1 << 32, (options.documents, HASHES), dtype=np.uint32)
    equal = int(0.1 * SIMILARITY ** Banding.of(SIMILARITY).rows * options.documents)
    signatures[-equal:] = signatures[:equal]
    parts = np.array_split(signatures, 100)
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    pairs = links_of_band(parts, 0, SIMILARITY)
    after = resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"band: {sum(map(len, parts)):,} documents: {time.process_time() - began:.1f} processor seconds, "
        f"{before.ru_maxrss / 1024:.0f} MiB before, {after.ru_maxrss / 1024:.0f} MiB at most; {len(pairs):,} links"
    )


def all_clusters(options: argparse.Namespace) -> None:
    """Print what joining the links to clusters costs, where every pair is found in several bands."""
    draw = np.random.default_rng(0)
    documents = 10 * options.pairs
    pairs = np.sort(draw.integers(0, documents, (options.pairs, 2)), axis=1)
    count = int(SIMILARITY ** Banding.of(SIMILARITY).rows * len(pairs))
    signatures = [np.broadcast_to(np.zeros(HASHES, dtype=np.uint32), (documents, HASHES))]
    began = time.process_time()
    removed, sizes = find_near_duplicates(
        signatures, SIMILARITY, map=lambda _, bands: (pairs[draw.integers(0, len(pairs), count)] for _ in bands)
    )
    print(
        f"clusters: {count:,} links in each band, {len(removed):,} documents removed from {sizes.total():,} clusters in "
        f"{time.process_time() - began:.1f} processor seconds; "
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
    of_band = kinds.add_parser("band")
    of_band.add_argument("--documents", type=int, default=4_000_000)
    of_band.set_defaults(run=one_band)
    of_clusters = kinds.add_parser("clusters")
    of_clusters.add_argument("--pairs", type=int, default=25_000_000)
    of_clusters.set_defaults(run=all_clusters)
    of_places = kinds.add_parser("places")
    of_places.add_argument("--documents", type=int, default=4_000_000)
    of_places.set_defaults(run=all_places)
    options = asked.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
