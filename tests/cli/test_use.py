"""`discern predict`, `score`, `evaluate --suite` and `bench`: what goes to which stream, and what is refused."""

from __future__ import annotations

import io
import json
import sys
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from discern.cli.console import Console
from discern.cli.diagnose import bench
from tests.inference.test_minimal_pairs import line
from tests.pretraining.test_evaluate import prepared
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import make_run
from tests.support import run_discern

TEXTS = ["The chef\tcooked [bold]the[/] meal.", "cats, 中文"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_finetuned(tmp_path_factory.mktemp("predict") / "model", own=SINGLE)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "a.csv"
    path.write_text("review,x\nthe chef,1\nhello,2\n")
    return path


def test_predictions_are_json_lines_or_part_of_one_object(model: Path, table: Path) -> None:
    done = run_discern("predict", model, table)
    lines = [json.loads(each) for each in done.stdout.splitlines()]
    assert [each["row"] for each in lines] == [0, 1]
    assert json.loads(run_discern("predict", model, table, "--json").stdout)["predictions"] == lines
    others = run_discern("predict", model, table, "--logits", "--text", "x").stdout.splitlines()
    assert "logits" in json.loads(others[0])


def test_a_file_of_predictions_is_summarized(model: Path, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    summary = json.loads(run_discern("predict", model, table, "--out", out, "--json").stdout)
    assert set(summary) == {"rows", "seconds", "rows_per_second", "out"}
    assert summary["rows"] == 2
    assert len(out.read_text().splitlines()) == 2
    assert run_discern("predict", model, table, "--out", out).stdout.startswith(f"{out}: 2 rows in ")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score") / "run"
    make_run(folder, overrides=["objective.name=electric", "data.sequence_length=16"])
    return folder


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return path


MEANS = {"num_tokens", "num_characters", "score_per_token", "score_per_character"}


def test_each_line_is_a_score_a_tab_and_the_sentence(run: Path, sentences: Path) -> None:
    found = json.loads(run_discern("score", run, sentences, "--json").stdout)
    assert set(found) == {"scorer", "quantity", "unit", "scores", "scores_per_token", "scores_per_character", *MEANS}
    assert found["scores_per_character"][0] == pytest.approx(found["scores"][0] / len(TEXTS[0]))
    assert found["score_per_character"] == pytest.approx(sum(found["scores"]) / 42)
    assert (found["unit"], found["scorer"]) == ("nats", "electric")
    done = run_discern("score", run, sentences)
    assert "scorer 'electric': unnormalized pseudo-log-likelihood" in done.stderr
    assert f"{found['score_per_character']:.4g} per character (42 characters)" in done.stderr
    printed = [each.split("\t", 1) for each in done.stdout.splitlines()]
    assert [text for _, text in printed] == TEXTS
    assert [float(value) for value, _ in printed] == pytest.approx(found["scores"], abs=1e-4)
    typed = [part for text in TEXTS for part in ("--text", text)]
    assert run_discern("score", run, *typed).stdout == done.stdout


def test_scores_of_tokens_are_json_lines_and_add_up(run: Path, sentences: Path) -> None:
    records = [json.loads(each) for each in run_discern("score", run, sentences, "--tokens").stdout.splitlines()]
    for record, text in zip(records, TEXTS, strict=True):
        assert set(record) == {"score", "text", "tokens", "offsets", "token_scores", *MEANS}
        assert record["text"] == text
        assert record["num_tokens"] == len(record["tokens"]) == len(record["offsets"]) == len(record["token_scores"])
        assert sum(record["token_scores"]) == pytest.approx(record["score"])
    found = json.loads(run_discern("score", run, sentences, "--tokens", "--json").stdout)
    assert [each["token_scores"] for each in found["tokens"]] == [record["token_scores"] for record in records]


def test_a_file_of_scores_is_complete_or_absent(run: Path, sentences: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    summary = json.loads(run_discern("score", run, sentences, "--out", out, "--json").stdout)
    assert set(summary) == {"scorer", "quantity", "unit", "sentences", "out", *MEANS}
    assert summary["sentences"] == 2
    assert [json.loads(each)["text"] for each in out.read_text(encoding="utf-8").splitlines()] == TEXTS
    sentences.write_text("cats\n\nthe meal\n")
    assert run_discern("score", run, sentences, "--out", tmp_path / "other.jsonl").returncode == 1
    assert not (tmp_path / "other.jsonl").exists()


def test_sentences_are_read_from_a_pipe(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"cats\n\nthe meal\n"), isatty=lambda: False))
    done = run_discern("score", run)
    assert done.returncode == 1
    assert done.stdout.endswith("\tcats\n")
    assert "standard input:2 is empty" in done.stderr
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    done = run_discern("score", run)
    assert done.returncode == 2
    assert "pipe them in, one per line" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("predict TUNED a.csv --text y", 2, "has no column 'y'"),
        ("predict TUNED nowhere.csv", 1, "nowhere.csv"),
        ("predict TUNED a.csv --format conll", 2, "unknown table format"),
        ("predict . a.csv", 1, "discern finetune MODEL --out OUT"),
        ("score RUN a.txt --scorer pll", 2, "for this model: --scorer electric or two-tower"),
        ("score RUN a.txt --text cat", 2, "--text and FILE are both given"),
        ("score RUN --text \u200b", 1, "contains nothing that the tokenizer keeps"),
        ("detect RUN a.txt --text cat", 2, "--text and INPUT are both given"),
        ("evaluate RUN --suite blimp", 2, "add --data DIR"),
        ("evaluate RUN --suite blimp --data . --task x --seed 0", 2, "--task and --seed cannot be combined with --suite"),
        ("evaluate RUN --suite blimp --data . --precision bfloat16", 2, "--precision cannot"),
        ("evaluate RUN --limit 3", 2, "leave out --limit"),
        ("bench", 2, "no configuration"),
        ("bench --preset tinny", 2, "did you mean 'tiny'"),
        ("bench --preset tiny --device warp", 2, "there is no device"),
    ],
)
def test_impossible_requests(run: Path, model: Path, table: Path, sentences: Path, arguments: str, code: int, says: str) -> None:
    models = {"RUN": run, "TUNED": model}
    done = run_discern(*(models.get(each, each) for each in arguments.split(" ")), cwd=table.parent)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["it's a cat"], '--text "it\'s a cat"'),
        (["--text", " "], "one --text is empty"),
        (["--text", "a cat\na dog"], "give each sentence its own"),
    ],
)
def test_a_sentence_is_given_by_its_option(run: Path, given: list[str], says: str) -> None:
    done = run_discern("score", run, *given)
    assert done.returncode == 2
    assert says in done.stderr


def test_a_suite_is_printed_by_scorer_and_phenomenon(run: Path, tmp_path: Path) -> None:
    (tmp_path / "first.jsonl").write_text(line("The chef cooked.", "The chef cook.", "first") + "\n")
    asked = ("evaluate", run, "--suite", "blimp", "--data", tmp_path, "--scorer", "electric", "--scorer", "two-tower")
    printed = run_discern(*asked).stdout.splitlines()
    assert printed[0].startswith("electric: ")
    assert ["phenomenon", "electric", "two-tower"] in [each.split() for each in printed]
    found = json.loads(run_discern(*asked, "--limit", "1", "--json").stdout)
    assert {"accuracy", "by_paradigm", "by_phenomenon", "pairs", "ties", "scorer", "by_scorer"} <= set(found)


BENCH = ("bench", "--preset", "tiny", "--set", "model.num_layers=1", "--vocab-size", "300", "--seconds", "0")


def test_a_benchmark_is_one_object_or_a_table_and_a_sentence() -> None:
    figures = json.loads(run_discern(*BENCH, "--json").stdout)
    assert (figures["preset"], figures["processes"]) == ("tiny", 1)
    assert min(figures["tokens_per_second"], figures["tokens_per_second_forward"]) > 0
    figures |= {"threads": 2, "speedup_over_float32": 0.96, "speedup_over_one_thread": 1.41}
    assert json.loads(shown_benchmark(figures, json_output=True)) == figures
    heading, *rows, sentence = shown_benchmark(figures).strip().splitlines()
    assert heading.split("  ")[-1].strip() == "forward only"
    assert [row.split("  ")[0] for row in rows[:2]] == ["tokens per second", "limit of its matrix products"]
    assert [row.split() for row in rows[-2:]] == [["speedup", "over", "float32", "0.96"], "speedup over one thread 1.41".split()]
    assert "sequences of 32 per step" in sentence
    assert "2 threads:" in sentence


@pytest.mark.parametrize(
    ("slow", "option"),
    [
        ({"speedup_over_float32": 0.94}, "--set train.precision=float32"),
        ({"speedup_over_bfloat16": 0.9}, "--set train.precision=bfloat16"),
        ({"threads": 4, "speedup_over_one_thread": 2.7}, "--nproc 2, unless other programs use the cores"),
    ],
)
def test_a_benchmark_suggests_what_was_faster(slow: dict[str, float], option: str) -> None:
    measured = defaultdict[str, Any](lambda: 2, preset="tiny", **slow)
    assert shown_benchmark(measured).endswith(f"\nThis may be faster: {option}\n")


def shown_benchmark(figures: dict[str, Any], *, json_output: bool = False) -> str:
    with redirect_stdout(io.StringIO()) as stdout:
        bench(Console(json_output=json_output), figures, {})
    return stdout.getvalue()


def test_the_meta_device_counts_without_computing() -> None:
    # XLNet-Large would need dozens of gigabytes.
    few = ("--set", "model.num_layers=3", "--set", "train.sequences_per_step=64")
    figures = json.loads(run_discern("bench", "--preset", "xlnet-large", *few, "--device", "meta", "--json").stdout)
    assert figures["flops_per_step"] > 64 * 512 * figures["parameters"]
    assert figures["peak_memory_bytes"] > 16 * figures["parameters"]
    assert (figures["precision"], figures["micro_batch_size"]) == ("bfloat16", 8)
    assert "GiB of tensors. Nothing was computed." in run_discern(*BENCH, "--device", "meta").stdout


def test_detection_prints_words_with_a_verdict(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run_discern("detect", small_model, "--text", "the model", "--text", "", "--threshold", 0).stdout.splitlines()
    assert [each.split()[1:3] for each in shown[1:3]] == [["*", "the"], ["*", "model"]]
    assert shown[3].startswith("2 of 2 words look replaced (threshold 0): ")
    assert shown[4:] == ["", "(empty)"]
    done = run_discern("detect", small_model, "--text", "the model", "--threshold", 1)
    assert "no word reaches 1; the highest: " in done.stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = run_discern("detect", small_model, "--text", "the model").stdout.splitlines()
    assert shown[0].startswith("probability of being replaced")
    assert "\x1b[" in shown[1]
    monkeypatch.delenv("FORCE_COLOR")
    out, page = tmp_path / "o.jsonl", tmp_path / "p.html"
    (tmp_path / "t.txt").write_text("the model\nreads\n")
    done = run_discern("detect", small_model, tmp_path / "t.txt", "--out", out, "--html", page)
    assert done.stdout.startswith(f"{out} and {page}: 2 texts, ")
    assert len(out.read_text().splitlines()) == 2
    assert "the model" in page.read_text()
    done = run_discern("detect", small_model, tmp_path / "t.txt", "--out", out, "--html", out)
    assert (done.returncode, "both name" in done.stderr) == (2, True)


def test_detection_is_measured_and_calibrated(small_model: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked.txt"
    marked.write_text("the [[model]] reads\nthe text\n")
    shown = run_discern("detect", small_model, "--evaluate", marked).stdout.splitlines()
    assert shown[0].startswith("2 sentences, 5 words, 1 of them wrong; AUC ")
    assert shown[1].split() == ["threshold", "precision", "recall", "F1", "marked"]
    assert any(each.endswith("best F1") for each in shown)
    data = prepared(tmp_path / "data", small_model / "tokenizer.json")
    done = run_discern("detect", small_model, "--calibrate", data, "--precision", 1, "--sequences", 8)
    assert ("none was stored" in done.stdout, "the most precise is " in done.stdout, done.returncode) == (True, True, 1)


def test_masks_and_rerankings_are_tables(small_model: Path, tmp_path: Path) -> None:
    shown = run_discern("fill", small_model, "the [MASK] reads [MASK]", "--top", 2).stdout.splitlines()
    assert [each.split(maxsplit=1)[1] for each in shown[::3]] == ["token at mask 1", "token at mask 2"]
    assert len(shown) == 6
    lists = tmp_path / "n.jsonl"
    hypotheses = [{"text": "the model reads", "score": -1.0}, {"text": "the model", "score": -1.1}]
    lists.write_text(json.dumps({"id": 0, "reference": "the model", "hypotheses": hypotheses}) + "\n")
    shown = run_discern("rerank", small_model, lists, "--out", tmp_path / "r.jsonl", "--lambda", 0).stdout.splitlines()
    assert shown[0].startswith(f"{tmp_path / 'r.jsonl'}: 1 list with 2 hypotheses in total, 0 with a new best hypothesis")
    assert shown[2].split()[:4] == ["wer", "0.5000", "0.5000", "+0.0000"]
