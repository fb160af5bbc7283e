"""What the commands of the pages and of every `--help` name, made small: texts, labeled files, runs and models."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.docs.pages import ROOT, prose
from tests.support import run_python

CHECKPOINT = ROOT / "tests" / "model_files" / "data" / "electra-tiny"
WORDS = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
CHINESE = "房间很干净，服务员的态度也好早餐不错位置方便下次还会来酒店电脑书价格便宜质量".replace("，", "")
STEPS = "--set train.max_steps=4 --set train.sequences_per_step=4"
START_SECONDS = 120.0


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=9)) + "."


def chinese(rng: random.Random) -> str:
    return "".join(rng.choices(CHINESE, k=12)) + "。"


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def environment(folder: Path) -> dict[str, str]:
    """The environment of a shell that finds this `discern` and this Python, whatever is installed."""
    programs = folder / ".bin"
    if not programs.exists():
        programs.mkdir()
        for name, command in (("python", sys.executable), ("discern", f"{sys.executable} -m discern")):
            (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (programs / name).chmod(0o755)
    source = f"{ROOT / 'src'}{os.pathsep}{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": source}


def shell(folder: Path, commands: str) -> None:
    """Run commands in a folder; every one must succeed. What needs no shell runs in this process."""
    if all(re.fullmatch(r"discern [^|&;<>*$]*[^\\|&;<>*$]", line) for line in commands.splitlines()):
        runs: Iterable[subprocess.CompletedProcess[str]] = (
            run_python("-m", *shlex.split(line), cwd=folder) for line in commands.splitlines()
        )
    else:
        command = ["bash", "-eu", "-o", "pipefail", "-c", commands]
        runs = [subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=600)]
    for done in runs:
        assert done.returncode == 0, (done.args, done.stdout[-2000:], done.stderr[-2000:])


class Server:
    """A `discern serve` or `discern watch` in the background, on a free port."""

    def __init__(self, folder: Path, line: str) -> None:
        """Start it and wait until it names its address, for at most two minutes."""
        self.line = line
        command = [sys.executable, "-m", *shlex.split(re.sub(r" --port \d+", "", line)), "--port", "0"]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment(folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdout is not None
        late = threading.Timer(START_SECONDS, self.process.kill)
        late.start()
        said = self.process.stdout.readline()  # empty if it ends
        late.cancel()
        if "http://127.0.0.1:" not in said:
            self.process.kill()
            raise AssertionError(f"{line} named no address in time: {said}{self.process.communicate()[1][-2000:]}")
        self.address = said[said.index("http://127.0.0.1:") :].split()[0].rstrip("/.,)")

    def stop(self) -> None:
        """Stop it with Ctrl-C; that is no failure."""
        self.process.send_signal(signal.SIGINT)
        try:
            _, problems = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert self.process.returncode == 0, (self.line, problems[-2000:])


def write_texts(folder: Path) -> None:
    """Texts and labeled files by the names that the pages give them."""
    rng = random.Random(0)
    documents = [sentence(rng) + ("\n" if n % 5 == 4 else "") for n in range(1500)]
    for name in ("wiki", "my-texts", "notes", "general"):
        write(folder / name / "a.txt", documents)
    # The rules of `--filter` keep running text only: that of the pages themselves.
    pages = [prose(page.read_text(encoding="utf-8")) for page in sorted((ROOT / "docs" / "concepts").glob("*.md"))]
    write(folder / "text" / "a.txt", ["\n".join(line for line in page.splitlines() if line) + "\n" for page in pages])
    write(folder / "语料" / "a.txt", [chinese(rng) + ("\n" if n % 5 == 4 else "") for n in range(1500)])
    write(folder / "words.txt", ["catdog", "riverbird"])
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    write(folder / "vocab.txt", [*special, ".", *WORDS])
    for name in ("sentences.txt", "texts.txt", "questions.txt"):
        write(folder / name, [sentence(rng) for _ in range(4)])
    write(folder / "mistakes.txt", ["The cat [[tree]] near the house.", "The old dog ran."])
    write(folder / "squad.jsonl", [json.dumps({"context": sentence(rng) + " " + sentence(rng)}) for _ in range(4)])
    for name in ("reviews.csv", "reviews-dev.csv", "held-out.csv"):
        write(folder / name, ["review,stars", *(f"{sentence(rng)},{stars}" for stars in "123" * 20)])
    write(folder / "reviews-zh.csv", ["review,stars", *(f"{chinese(rng)},{stars}" for stars in "123" * 20)])
    write(folder / "pairs.csv", ["anchor,positive", *(f"{sentence(rng)},{sentence(rng)}" for _ in range(40))])
    write(folder / "judged.csv", ["sentence1,sentence2,score", *(f"{sentence(rng)},{sentence(rng)},{n % 6}" for n in range(20))])
    write(folder / "new-reviews.csv", ["review", sentence(rng), sentence(rng)])
    for name in ("dev.jsonl", "test.jsonl"):
        hypotheses = [[{"text": sentence(rng), "score": -n} for n in range(3)] for _ in range(4)]
        write(folder / name, [json.dumps({"hypotheses": each, "reference": sentence(rng)}) for each in hypotheses])
    pair = {"sentence_good": "the cat sat.", "sentence_bad": "cat the sat.", "UID": "order", "linguistics_term": "syntax"}
    write(folder / "blimp" / "data" / "order.jsonl", [json.dumps(pair)] * 3)
    _write_tasks(folder, rng)
    write(folder / "my-run.toml", ['extends = "tiny"', "[train]", "max_steps = 10"])
    write(folder / "my.toml", ['extends = "tiny"'])
    runs = '[[run]]\nname = "rtd"\n[[run]]\nname = "mlm"\nset.objective.name = "mlm"'
    write(folder / "compare.toml", ["seeds = 1", 'tasks = ["rte"]', runs, '[finetune.set]\n"train.max_steps" = 2'])
    (folder / "examples").symlink_to(ROOT / "examples")
    judged = [f"{sentence(rng)},{sentence(rng)},{n % 6}" for n in range(40)]
    write(folder / "judged-train.csv", ["sentence1,sentence2,score", *judged])
    write(folder / "paragraphs.txt", [" ".join(sentence(rng) for _ in range(5)) for _ in range(40)])


def _write_tasks(folder: Path, rng: random.Random) -> None:
    for split in ("train", "dev", "test"):
        pairs = enumerate(("entailment", "not_entailment") * 15)
        rows = [f"{n}\t{sentence(rng)}\t{sentence(rng)}\t{kind}" for n, kind in pairs]
        if split != "test":  # a submission takes GLUE's own test file, or fills in for one that is missing
            for place in (folder / "glue", folder / "tasks" / "glue"):
                write(place / "RTE" / f"{split}.tsv", ["index\tsentence1\tsentence2\tlabel", *rows])
        films = [f"{sentence(rng)}\t{label}" for label in "01" * 20]
        write(folder / "glue" / "SST-2" / f"{split}.tsv", ["sentence\tlabel", *films])
    questions = [f"{n}\t{sentence(rng)}\t{sentence(rng)}\tentailment" for n in range(10)]
    write(folder / "glue" / "QNLI" / "dev.tsv", ["index\tquestion\tsentence\tlabel", *questions])
    head = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
    for split in ("train", "dev"):
        rows = [f"{n}\tg\tf\t2012\t{n}\ts\ts\t{sentence(rng)}\t{sentence(rng)}\t{n % 6}.000" for n in range(30)]
        write(folder / "tasks" / "glue" / "STS-B" / f"{split}.tsv", [head, *rows])
    tagged = [line for _ in range(40) for line in ("the DT B-NP", "old JJ I-NP", "cat NN I-NP", "sat VBD B-VP", ". . O", "")]
    for place in (folder / "conll2000", folder / "tasks" / "conll2000"):
        for split in ("train", "test"):
            write(place / f"{split}.txt", tagged)
    named = [line for _ in range(20) for line in ("Cat NNP x B-PER", "sat VBD x O", "near IN x O", "River NNP x B-LOC", "")]
    for name in ("train.conll", "dev.conll", "test.conll"):
        write(folder / name, named)
    write(folder / "new.conll", [line.split()[0] if line else "" for line in named[:5]])
    answer = {"text": "old cat", "answer_start": 4}
    asked = [{"id": f"q{n}", "question": "who sat", "answers": [answer], "is_impossible": False} for n in range(10)]
    asked += [{"id": f"n{n}", "question": "who flew", "answers": [], "is_impossible": True} for n in range(10)]
    article = {"title": "Cats", "paragraphs": [{"context": "The old cat sat near the river.", "qas": asked}]}
    for split in ("train", "dev"):
        write(folder / "squad2" / f"{split}.json", [json.dumps({"version": "v2.0", "data": [article]})])
    _write_chinese(folder, rng)


def _write_chinese(folder: Path, rng: random.Random) -> None:
    for name in ("cmrc2018_dev.json", "cmrc2018_trial.json"):
        articles = [{"context_text": chinese(rng) * 5} for _ in range(100)]
        write(folder / "cmrc2018" / name, [json.dumps(articles, ensure_ascii=False)])
    write(folder / "chnsenticorp" / "train.tsv", ["label\ttext_a", *(f"1\t{chinese(rng)}" for _ in range(200))])
    abstracts = [json.dumps({"abst": chinese(rng)}, ensure_ascii=False) for _ in range(200)]
    write(folder / "csl" / "test_public.json", abstracts)
    tagged = [line for _ in range(30) for line in ("酒0\tB-LOC.NAM", "店1\tI-LOC.NAM", "很0\tO", "好0\tO", "")]
    for split in ("train", "dev", "test"):
        write(folder / "weibo-ner" / f"weiboNER_2nd_conll.{split}", tagged)


def write_models(folder: Path) -> None:
    """Data sets, runs, exports, fine-tuned models and models of others, made with the commands themselves."""
    commands = [
        "discern prepare wiki/ --out DATA --train-tokenizer wordpiece --vocab-size 70 --heldout 0.1",
        f"discern pretrain --preset tiny --data DATA --out RUN {STEPS} "
        "--set optimizer.schedule=wsd --set optimizer.warmup_steps=1 --set optimizer.decay_steps=1",
        f"discern pretrain --preset tiny --data DATA --out runs/electric {STEPS} --set objective.name=electric",
        f"discern pretrain --preset tiny --data DATA --out RUN-CASED {STEPS} --set objective.name=mlm "
        "--set model.embedding_size=32 --set model.hidden_size=32",
        "discern export RUN --out MODEL --all-networks",
        "discern export RUN --out hub/discriminator",
        "discern export RUN --out hub/generator --network generator",
        "discern export RUN-CASED --out downloads/bert-base-german --as bert",
        "discern finetune MODEL --train reviews.csv --text review --label stars --out OUT --set train.max_steps=2",
        "discern embed MODEL texts.txt --out vectors.npy",
    ]
    shell(folder, "\n".join(commands))
    for name in ("hub/discriminator", "hub/generator", "downloads/bert-base-german"):
        _as_of_others(folder / name)
    copies: Mapping[str, tuple[str, ...]] = {
        "DATA": ("GENERAL", "data"),
        "RUN": ("runs/first", "runs/second"),
        "RUN-CASED": ("RUN-UNCASED",),
        "MODEL": ("models/first", "FOLDER"),
        "hub/discriminator": ("google/electra-small-discriminator", "downloads/koelectra-discriminator"),
        "hub/generator": ("downloads/koelectra-generator",),
        "OUT": ("stars", "LARGE"),
    }
    for made, names in copies.items():
        for name in names:
            shutil.copytree(folder / made, folder / name)
    for place in ("electra-small", "downloads/electra", "downloads/electra_small"):
        shutil.copytree(CHECKPOINT, folder / place)
        for path in (folder / place).glob("model.ckpt-*"):
            path.rename(path.with_name("model.ckpt-1000000." + path.name.split(".", 2)[2]))


def _as_of_others(export: Path) -> None:
    """Take from an export what only discern writes."""
    for name in ("discern.toml", "checksums.json", "README.md"):
        (export / name).unlink(missing_ok=True)
    config = json.loads((export / "config.json").read_text())
    config.pop("discern", None)
    (export / "config.json").write_text(json.dumps(config))
