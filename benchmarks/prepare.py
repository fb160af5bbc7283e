"""Compare `discern prepare` with `encode_batch_fast` of the tokenizers library, on the same text and cores; measure peak memory.

    python benchmarks/prepare.py TEXT... --tokenizer VOCAB [--rounds 5] [--workers 2] [--memory]
    python benchmarks/prepare.py TEXT... --tokenizer VOCAB --cost

TEXT is any input of `discern prepare`, uncompressed if decompression should not count. The two are timed in turns, each in a
process of its own. The library gets the sentences of the same documents, already in memory, in batches of 1,000, and its
encodings are discarded; discern reads the files, cuts them into documents, tokenizes, finds the words, counts, hashes,
writes and syncs. The start of the interpreter is not counted; the start of discern's workers is. --memory measures the
peak of all processes together, on the input and on four copies of it. --cost measures processor seconds and bytes per GB of text
of each step with near-duplicates, in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

LIBRARY = """
import json, sys, time
from pathlib import Path
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions
from discern.data.sources.documents import ProblemLog
from discern.data.tokenizer import load_tokenizer
request = json.loads(sys.argv[1])
documents = Corpus(request["inputs"], CorpusOptions()).documents(ProblemLog())
sentences = [sentence for document in documents for sentence in document]
tokenizer = load_tokenizer(Path(request["tokenizer"]))
tokens, start = 0, time.perf_counter()
for first in range(0, len(sentences), 1000):
    tokens += sum(map(len, tokenizer.encode_batch_fast(sentences[first : first + 1000], add_special_tokens=False)))
print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - start}))
"""

DISCERN = """
import json, sys
from pathlib import Path
from discern.data.job import PrepareOptions
from discern.data.tokenizer.choice import TokenizerChoice
from discern.progress import Silent
from discern.data.prepare import prepare
request = json.loads(sys.argv[1])
choice, build = TokenizerChoice(Path(request["tokenizer"])), PrepareOptions(workers=request["workers"])
report = prepare(request["inputs"], out=Path(request["out"]), tokenizer=choice, options=build, progress=Silent())
print(json.dumps({"tokens": report.manifest.statistics.tokens, "seconds": report.seconds}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--cost", action="store_true")
    arguments = parser.parse_args()
    if arguments.cost:
        cost(arguments.inputs, Path(arguments.tokenizer))
        return
    with tempfile.TemporaryDirectory() as work:
        request = {"inputs": arguments.inputs, "tokenizer": arguments.tokenizer, "workers": arguments.workers}
        compare(request, Path(work), arguments.rounds)
        if arguments.memory:
            memory(request, Path(work))


def compare(request: dict[str, object], work: Path, rounds: int) -> None:
    """Run both in turn; return the median tokens per second of each, and the median ratio of neighboring runs."""
    speeds: dict[str, list[float]] = {"library": [], "discern": []}
    for number in range(rounds):
        for name, program in (("library", LIBRARY), ("discern", DISCERN)):
            found = run(program, request | {"out": str(work / "data")})
            shutil.rmtree(work / "data", ignore_errors=True)
            speeds[name].append(found["tokens"] / found["seconds"])
            print(f"round {number + 1}: {name} {found['tokens']:,.0f} tokens in {found['seconds']:.2f} s", flush=True)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = statistics.median(b / a for a, b in zip(speeds["library"], speeds["discern"], strict=True))
    print(f"medians: library {medians['library']:,.0f} tokens/s, discern {medians['discern']:,.0f} tokens/s, ratio {ratio:.2f}")


def cost(inputs: list[str], vocabulary: Path) -> None:
    """Print the processor seconds and the bytes written of each step, per GB of the input as stored."""
    from discern.data.curation.near_duplicates import banding
    from discern.data.job import Job, PrepareOptions, links_of_band, make_piece
    from discern.data.prepare import prepare
    from discern.data.sources.corpus import Corpus
    from discern.data.sources.documents import CorpusOptions
    from discern.data.tokenizer import fingerprint, load_tokenizer
    from discern.data.tokenizer.choice import TokenizerChoice
    from discern.progress import Silent

    def report(name: str, began: float, written: int) -> None:
        print(f"{name}: {(time.process_time() - began) / size:.1f} s per GB, {written / 1e9 / size:.3f} GB written per GB")

    options, tokenizer = PrepareOptions(workers=1, near_duplicates=0.8), load_tokenizer(vocabulary)
    text = Corpus(inputs, CorpusOptions())
    size = (text.total_bytes or 0) / 1e9
    job = Job.of(text, options, fingerprint(tokenizer), None)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "data"
        work = job.folder_beside(target)
        job.write(work)
        (work / "tokenizer.json").write_text(tokenizer.to_str())
        began = time.process_time()
        for index in range(len(job.pieces)):
            make_piece(str(work), index)
        report("parts", began, total(work, "*.part"))
        print(f"signatures: {total(work, '*.signatures') / 1e9 / size:.3f} GB written per GB")
        began = time.process_time()
        links = sum(len(links_of_band(str(work), band)) for band in range(banding(0.8)[0]))
        report(f"bands ({links:,} links)", began, 0)
        began = time.process_time()
        choice = TokenizerChoice(vocabulary)
        found = prepare(inputs, out=target, tokenizer=choice, options=options, progress=Silent()).manifest  # with the bands again
        report("bands, clusters and merge", began, total(target, "*.*"))
        documents = found.statistics.documents
        print(f"{documents:,} documents kept of {size:.3f} GB")


def total(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def memory(request: dict[str, object], work: Path) -> None:
    """Measure the peak resident memory of the whole process tree, with the input and with four copies of it."""
    for times in (1, 4):
        inputs = [item for item in request["inputs"] for _ in range(times)]  # type: ignore[attr-defined]
        peak = Peak()
        run(DISCERN, request | {"inputs": inputs, "out": str(work / f"data{times}")}, peak)
        print(
            f"{times} x the input: peak {peak.parent / 2**20:,.0f} MiB in the parent, {peak.all / 2**20:,.0f} MiB in all",
            flush=True,
        )


class Peak:
    """Peak resident memory of a process, and of it with its children, in bytes; sampled every 20 ms."""

    def __init__(self) -> None:
        self.parent = self.all = 0

    def watch(self, process: subprocess.Popen[str]) -> None:
        while process.poll() is None:
            sizes = [resident(process.pid), *map(resident, children(process.pid))]
            self.parent, self.all = max(self.parent, sizes[0]), max(self.all, sum(sizes))
            time.sleep(0.02)


def resident(number: int) -> int:
    try:
        return int(Path(f"/proc/{number}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def children(number: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{number}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []


def run(program: str, request: dict[str, object], peak: Peak | None = None) -> dict[str, float]:
    """Return what the program prints, with as many threads for the library as discern has workers."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(request["workers"])}
    command = [sys.executable, "-c", program, json.dumps(request)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    watcher = threading.Thread(target=peak.watch, args=(process,)) if peak else None
    if watcher:
        watcher.start()
    output, _ = process.communicate()
    if watcher:
        watcher.join()
    if process.returncode:
        raise SystemExit(f"failed with exit status {process.returncode}")
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
