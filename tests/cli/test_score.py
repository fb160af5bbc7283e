"""The verb `discern score` and `discern evaluate --suite`: their streams and exit codes."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from discern.cli.main import main
from tests.inference.test_minimal_pairs import line
from tests.small.run import make_run

TEXTS = ["The chef\tcooked [bold]the[/] meal.", "cats, 中文"]


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


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of `discern ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["discern", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_each_line_is_a_score_a_tab_and_the_sentence(
    run: Path, sentences: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "score", run, sentences, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    means = {"num_tokens", "num_characters", "score_per_token", "score_per_character"}
    assert set(found) == {"scorer", "quantity", "unit", "scores", "scores_per_token", "scores_per_character", *means}
    assert found["num_characters"] == sum(map(len, TEXTS)) == 42
    assert found["scores_per_character"] == pytest.approx(
        [score / len(text) for score, text in zip(found["scores"], TEXTS, strict=True)]
    )
    assert found["score_per_character"] == pytest.approx(sum(found["scores"]) / 42)
    assert found["score_per_token"] == pytest.approx(sum(found["scores"]) / found["num_tokens"])
    assert found["unit"] == "nats"
    assert found["quantity"].startswith("unnormalized pseudo-log-likelihood")
    assert found["scorer"] == "electric"
    assert call(monkeypatch, "score", run, sentences) == 0
    captured = capsys.readouterr()
    assert "scorer 'electric': unnormalized pseudo-log-likelihood" in captured.err
    assert "in nats" in captured.err
    assert f"{found['score_per_character']:.4g} per character (42 characters)" in captured.err
    printed = [each.split("\t", 1) for each in captured.out.splitlines()]
    assert [text for _, text in printed] == TEXTS
    assert [float(value) for value, _ in printed] == pytest.approx(found["scores"], abs=1e-4)
    typed = [part for text in TEXTS for part in ("--text", text)]
    assert call(monkeypatch, "score", run, *typed) == 0
    assert capsys.readouterr().out == captured.out


def test_the_pseudo_perplexity_is_that_of_the_tokens_scored(
    sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "mlm", overrides=["objective.name=mlm", "data.sequence_length=16"])
    assert call(monkeypatch, "score", tmp_path / "mlm", sentences, "--tokens", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    numbers = [number for each in found["tokens"] for number in each["token_scores"]]
    assert found["pseudo_perplexity"] == pytest.approx(math.exp(-sum(numbers) / len(numbers)))
    assert call(monkeypatch, "score", tmp_path / "mlm", sentences, "--out", tmp_path / "out.jsonl") == 0
    assert f"pseudo-perplexity {found['pseudo_perplexity']:.4g} over {len(numbers)} tokens" in capsys.readouterr().err


def test_tokens_come_as_json_lines_and_sum_up_to_the_score(
    run: Path, sentences: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "score", run, sentences, "--tokens") == 0
    records = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    for record, text in zip(records, TEXTS, strict=True):
        means = {"num_characters", "score_per_token", "score_per_character"}
        assert set(record) == {"score", "text", "num_tokens", "tokens", "offsets", "token_scores", *means}
        assert record["score_per_token"] == pytest.approx(record["score"] / record["num_tokens"])
        assert (record["num_characters"], record["score_per_character"]) == (
            len(text),
            pytest.approx(record["score"] / len(text)),
        )
        assert record["text"] == text
        assert record["num_tokens"] == len(record["tokens"]) == len(record["offsets"]) == len(record["token_scores"])
        assert sum(record["token_scores"]) == pytest.approx(record["score"])
    assert call(monkeypatch, "score", run, sentences, "--tokens", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["token_scores"] for each in found["tokens"]] == [record["token_scores"] for record in records]


def test_a_file_is_written_whole(
    run: Path, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert call(monkeypatch, "score", run, sentences, "--out", out, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    means = {"num_tokens", "num_characters", "score_per_token", "score_per_character"}
    assert set(summary) == {"scorer", "quantity", "unit", "sentences", "out", *means}
    records = [json.loads(each) for each in out.read_text(encoding="utf-8").splitlines()]
    assert summary["num_characters"] == sum(record["num_characters"] for record in records)
    assert (summary["scorer"], summary["sentences"], summary["out"]) == ("electric", 2, str(out))
    assert [json.loads(each)["text"] for each in out.read_text(encoding="utf-8").splitlines()] == TEXTS
    sentences.write_text("cats\n\nthe meal\n")
    assert call(monkeypatch, "score", run, sentences, "--out", tmp_path / "other.jsonl") == 1
    assert not (tmp_path / "other.jsonl").exists()


def test_standard_input_and_an_empty_line(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stream = SimpleNamespace(buffer=io.BytesIO(b"cats\n\nthe meal\n"), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stream)
    assert call(monkeypatch, "score", run) == 1
    printed = capsys.readouterr()
    assert printed.out.endswith("\tcats\n")
    assert "standard input:2 is empty" in printed.err
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert call(monkeypatch, "score", run) == 2
    assert "pipe in sentences" in capsys.readouterr().err


def test_wrong_questions(
    run: Path, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "score", run, sentences, "--scorer", "pll") == 2
    assert "for this model: --scorer electric or two-tower" in capsys.readouterr().err
    assert call(monkeypatch, "score", run, sentences, "--out", sentences) == 2
    assert call(monkeypatch, "score", run, tmp_path / "nowhere.txt") == 1
    assert call(monkeypatch, "score", tmp_path, sentences) == 1
    capsys.readouterr()
    for verb in ("score", "detect"):
        assert call(monkeypatch, verb, run, "it's a cat") == 2
        assert """to give a text itself: --text 'it'"'"'s a cat'""" in capsys.readouterr().err
    assert call(monkeypatch, "score", run, sentences, "--text", "a cat") == 2
    assert "--text and FILE are both given" in capsys.readouterr().err
    assert call(monkeypatch, "score", run, "--text", " ") == 2
    assert "one --text is empty" in capsys.readouterr().err
    assert call(monkeypatch, "score", run, "--text", "a cat\na dog") == 2
    assert "give each sentence its own --text" in capsys.readouterr().err
    assert call(monkeypatch, "score", run, "--text", "a cat", "--text", "\u200b") == 1
    assert "text 2 contains nothing that the tokenizer keeps" in capsys.readouterr().err
    assert call(monkeypatch, "score", "--help") == 0
    assert "discern score runs/first sentences.txt" in capsys.readouterr().out


def test_a_suite_is_printed_by_scorer_and_given_as_json(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "first.jsonl").write_text(line("The chef cooked.", "The chef cook.", "first") + "\n")
    asked = ("evaluate", run, "--suite", "blimp", "--data", tmp_path, "--scorer", "electric", "--scorer", "two-tower")
    assert call(monkeypatch, *asked) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("electric: ")
    assert ["phenomenon", "electric", "two-tower"] in [each.split() for each in printed]
    assert call(monkeypatch, *asked, "--limit", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"accuracy", "by_paradigm", "by_phenomenon", "pairs", "ties", "scorer", "by_scorer"} <= set(found)


def test_options_that_say_nothing_beside_a_suite_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = ("evaluate", run, "--suite", "blimp")
    assert call(monkeypatch, *suite, "--data", tmp_path, "--task", "x", "--seed", "0") == 2
    assert "--task and --seed cannot be combined with --suite" in capsys.readouterr().err
    assert call(monkeypatch, *suite) == 2
    assert "add --data DIR" in capsys.readouterr().err
    assert call(monkeypatch, "evaluate", run, "--limit", "3") == 2
    assert "add --suite blimp" in capsys.readouterr().err
    assert call(monkeypatch, *suite, "--data", tmp_path, "--precision", "bfloat16") == 2
