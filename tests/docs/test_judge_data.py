"""The program that makes the files by which recipes are judged, on a small copy of its data."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

from tests.docs.pages import ROOT
from tests.support import run_python

PROGRAM = ROOT / "benchmarks" / "judge_data.py"
MIDDLE = "The sentence in the middle of a document is the one that is taken."


def make_data(folder: Path) -> Path:
    """Two documents with a fitting sentence and one without, 50 pairs, 1,003 sentences with chunks, and four tasks."""
    around = "This sentence is as long as it has to be to fit. {} A short one. Another one that is as long as it has to be."
    texts = [around.format(MIDDLE), "Nothing here fits.", around.format(MIDDLE.replace("document", "text"))]
    documents = [f'<doc id="{number}" title="T">\nT\n\n{text}\n</doc>\n' for number, text in enumerate(texts)]
    files = {
        "text/unseen": "".join(documents),
        "blimp/agreement.jsonl": "".join(json.dumps({"pair": number}) + "\n" for number in range(50)),
        "conll2000/train.txt": "\n\n".join(f"word{number} NN B-NP" for number in range(1003)) + "\n\n",
        **{f"glue/{name}/dev.tsv": f"{name}\n" for name in ("STS-B", "QNLI", "SST-2", "CoLA")},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def run(data: Path, out: Path, sentences: int) -> CompletedProcess[str]:
    return run_python(PROGRAM, data, "--out", out, "--text", "text/unseen", "--sentences", str(sentences))


def test_each_file_is_what_the_program_says(tmp_path: Path) -> None:
    out = tmp_path / "judges"
    done = run(make_data(tmp_path / "data"), out, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sentences.txt: 2 sentences, ")
    assert (out / "sentences.txt").read_text().splitlines() == [MIDDLE, MIDDLE.replace("document", "text")]
    pairs = (out / "blimp" / "agreement.jsonl").read_text().splitlines()
    assert [json.loads(line)["pair"] for line in pairs] == list(range(10, 50))
    assert (out / "tasks" / "chunk" / "train.txt").read_text() == "word0 NN B-NP\n\nword1 NN B-NP\n\nword2 NN B-NP\n"
    assert (out / "tasks" / "chunk" / "test.txt").read_text().split("\n\n")[0] == "word3 NN B-NP"
    assert (out / "tasks" / "stsb" / "dev.tsv").read_text() == "STS-B\n"


def test_too_little_text_is_an_error(tmp_path: Path) -> None:
    done = run(make_data(tmp_path / "data"), tmp_path / "judges", 3)
    assert done.returncode == 2
    assert "text/unseen has 2 documents with a sentence to take; asked for 3" in done.stderr
