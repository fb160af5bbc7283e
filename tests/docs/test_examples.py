"""The examples of every `--help`, run as they stand in a folder that has what they name; only what takes hours is made small."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from docs._sphinx.commands import verbs

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "interop" / "data" / "electra-tiny"
WORDS = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
STEPS = "--set train.max_steps=4 --set train.sequences_per_step=4"
# tests/demo runs the demo.
EXAMPLES = [(verb.name, line) for verb in verbs() for line in verb.examples if verb.name != "demo"]
SMALL = {
    "--preset electra-small --data DATA --out RUN --set train.max_hours=10": f"--preset tiny --data DATA --out RUN {STEPS}",
    "--set train.max_steps=20000": STEPS,
    "--set train.max_steps=2000": STEPS,
    "--set optimizer.decay_steps=2000": "--set optimizer.decay_steps=2",
    "--add-tokens 500": f"--add-tokens 2 {STEPS}",
    "--vocab-size 8000": "--vocab-size 200",
    "--seeds 3": "--seeds 2",
    "finetune MODEL": "finetune MODEL --set train.max_steps=2",
    "--preset electra-small --data DATA --task-data": f"--preset tiny {STEPS} --data DATA --task-data",
    "bench --preset electra-small": "bench --preset tiny --steps 2",
    "--precision 0.9": "--precision 0.05",
    "--max-loss 0.01": "--max-loss 1",
    "discern serve": "discern serve --port 0",
    "discern watch": "discern watch --port 0",
    " --port 8080": "",
}
# What an example writes must not be there before.
WRITES = {
    "prepare": ["DATA"],
    "pretrain": ["RUN", "DECAYED"],
    "adapt": ["OUT", "OUT-data"],
    "finetune": ["OUT"],
    "compare": ["OUT"],
}
SERVERS = ("serve", "watch")

pytestmark = pytest.mark.slow


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=9)) + "."


def discern(folder: Path, line: str) -> None:
    command = line.replace("discern", f"{sys.executable} -m discern")
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-2000:])


def served(folder: Path, line: str) -> None:
    """Start a server, wait until it names its address, and stop it with Ctrl-C."""
    command = [sys.executable, "-m", *shlex.split(line)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()  # empty if it ends
        process.send_signal(signal.SIGINT)
        _, problems = process.communicate(timeout=60)
    assert "http://127.0.0.1:" in said, (line, problems[-2000:])
    assert process.returncode == 0, (line, problems[-2000:])


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_texts(folder: Path) -> None:
    rng = random.Random(0)
    write(folder / "wiki" / "a.txt", [sentence(rng) + ("\n" if n % 5 == 4 else "") for n in range(1500)])
    for name in ("sentences.txt", "texts.txt", "questions.txt"):
        write(folder / name, [sentence(rng) for _ in range(4)])
    for name in ("reviews.csv", "reviews-dev.csv"):
        write(folder / name, ["review,stars", *(f"{sentence(rng)},{stars}" for stars in "123" * 20)])
    write(folder / "pairs.csv", ["anchor,positive", *(f"{sentence(rng)},{sentence(rng)}" for _ in range(40))])
    write(folder / "judged.csv", ["sentence1,sentence2,score", *(f"{sentence(rng)},{sentence(rng)},{n % 6}" for n in range(20))])
    write(folder / "new-reviews.csv", ["review", sentence(rng), sentence(rng)])
    for split in ("train", "dev"):
        rows = [
            f"{number}\t{sentence(rng)}\t{sentence(rng)}\t{kind}"
            for number, kind in enumerate(("entailment", "not_entailment") * 15)
        ]
        write(folder / "glue" / "RTE" / f"{split}.tsv", ["index\tsentence1\tsentence2\tlabel", *rows])
        write(
            folder / "glue" / "SST-2" / f"{split}.tsv", ["sentence\tlabel", *(f"{sentence(rng)}\t{label}" for label in "01" * 20)]
        )
    for name in ("dev.jsonl", "test.jsonl"):
        lists = [
            {"hypotheses": [{"text": sentence(rng), "score": -n} for n in range(3)], "reference": sentence(rng)} for _ in range(4)
        ]
        write(folder / name, [json.dumps(each) for each in lists])
    pair = {"sentence_good": "the cat sat.", "sentence_bad": "cat the sat.", "UID": "order", "linguistics_term": "syntax"}
    write(folder / "blimp" / "data" / "order.jsonl", [json.dumps(pair)] * 3)
    write(folder / "my-run.toml", ['extends = "tiny"', "[train]", "max_steps = 10"])
    runs = '[[run]]\nname = "rtd"\n[[run]]\nname = "mlm"\nset.objective.name = "mlm"'
    write(folder / "compare.toml", ["seeds = 1", 'tasks = ["rte"]', runs, '[finetune.set]\n"train.max_steps" = 2'])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the examples name, made with the commands themselves."""
    folder = tmp_path_factory.mktemp("world")
    write_texts(folder)
    discern(folder, "discern prepare wiki/ --out DATA --train-tokenizer wordpiece --vocab-size 200 --heldout 0.1")
    for name in ("GENERAL", "data"):
        shutil.copytree(folder / "DATA", folder / name)
    schedule = "--set optimizer.schedule=wsd --set optimizer.warmup_steps=1 --set optimizer.decay_steps=1"
    discern(folder, f"discern pretrain --preset tiny --data DATA --out RUN {STEPS} {schedule}")
    for name in ("first", "second"):
        shutil.copytree(folder / "RUN", folder / "runs" / name)
    discern(folder, f"discern pretrain --preset tiny --data DATA --out runs/electric {STEPS} --set objective.name=electric")
    discern(folder, "discern export RUN --out MODEL --all-networks")
    discern(folder, "discern export RUN --out hub/discriminator")
    discern(folder, "discern export RUN --out hub/generator --network generator")
    shutil.copytree(folder / "hub" / "discriminator", folder / "google" / "electra-small-discriminator")
    discern(folder, "discern finetune MODEL --train reviews.csv --text review --label stars --out OUT --set train.max_steps=2")
    discern(folder, "discern embed MODEL texts.txt --out vectors.npy")
    (folder / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(CHECKPOINT, folder / "electra-small")
    for path in (folder / "electra-small").glob("model.ckpt-*"):
        path.rename(path.with_name("model.ckpt-1000000." + path.name.split(".", 2)[2]))
    return folder


@pytest.mark.parametrize(("verb", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_runs(verb: str, line: str, world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(world, folder, symlinks=True)
    for name in WRITES.get(verb, []):
        # A folder that the example reads as well is kept.
        if f"--out {name}" in line:
            shutil.rmtree(folder / name, ignore_errors=True)
    for written, small in SMALL.items():
        line = line.replace(written, small)
    (served if verb in SERVERS else discern)(folder, line)
