"""N-best lists in every form that is read, and what is said of those that are not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from discern.errors import DataError
from discern.inference.nbest import Hypothesis, NBest, read_nbest

EXPECTED = [
    NBest("a", (Hypothesis("the cat sat", -1.5), Hypothesis("the cat sad", -2.0)), "the cat sat"),
    NBest("b", (Hypothesis("", -3.0),), None),
]
OWN = [
    {
        "id": "a",
        "reference": "the cat sat",
        "hypotheses": [{"text": "the cat sat", "score": -1.5}, {"text": "the cat sad", "score": -2}],
    },
    {"id": "b", "hypotheses": [{"text": "", "score": -3.0}]},
]


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_json_lines_blank_lines_passed_over(tmp_path: Path) -> None:
    lines = "\n\n".join(json.dumps(record) for record in OWN) + "\n"
    assert read_nbest(written(tmp_path / "a.jsonl", lines)) == EXPECTED
    (tmp_path / "a.gz").write_bytes(gzip.compress(lines.encode()))
    assert read_nbest(tmp_path / "a.gz") == EXPECTED


def test_an_array_and_a_single_object_over_several_lines(tmp_path: Path) -> None:
    assert read_nbest(written(tmp_path / "a.json", json.dumps(OWN, indent=1))) == EXPECTED
    assert read_nbest(written(tmp_path / "a.json", json.dumps(OWN[0], indent=1))) == EXPECTED[:1]


def test_mlm_scoring_is_ordered_by_number(tmp_path: Path) -> None:
    numbered = {f"hyp_{number}": {"score": -number, "text": f" text {number} "} for number in (10, 2, 1)}
    (found,) = read_nbest(written(tmp_path / "dev.am.json", {"1272-128104-0000": {**numbered, "ref": "mister quilter "}}))
    assert (found.id, found.reference) == ("1272-128104-0000", "mister quilter")
    assert found.hypotheses == tuple(Hypothesis(f"text {number}", -number) for number in (1, 2, 10))


def test_espnet(tmp_path: Path) -> None:
    output = [
        {"name": "target1[1]", "rec_text": "▁the▁cat<eos>", "score": -0.5, "text": None, "rec_token": "x"},
        {"name": "target1[2]", "rec_text": "the cad <eos>", "score": -0.75, "text": "THE CAT"},
    ]
    (found,) = read_nbest(written(tmp_path / "data.json", {"utts": {"u1": {"input": [], "output": output, "utt2spk": "s"}}}))
    assert found == NBest("u1", (Hypothesis("the cat", -0.5), Hypothesis("the cad", -0.75)), "THE CAT")


def test_a_null_does_not_hide_another_name(tmp_path: Path) -> None:
    record = {"reference": None, "ref": "a", "nbest": [{"text": None, "transcript": "b", "score": None, "confidence": 1}]}
    assert read_nbest(written(tmp_path / "a.json", json.dumps(record))) == [NBest(1, (Hypothesis("b", 1.0),), "a")]


def test_vosk_lines_are_numbered(tmp_path: Path) -> None:
    lines = [{"alternatives": [{"confidence": 212.5, "text": "one"}, {"confidence": 211, "text": "won"}]}] * 2
    found = read_nbest(written(tmp_path / "a", "\n".join(map(json.dumps, lines))))
    assert [each.id for each in found] == [1, 2]
    assert found[1].hypotheses == (Hypothesis("one", 212.5), Hypothesis("won", 211.0))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no lists"),
        ("\n\n", "has no lists"),
        ("[]", "has no lists"),
        ("the cat sat\n", "not JSON: Expecting value"),
        ({"a": 1}, "is JSON, but not a file of n-best lists"),
        ({}, "is JSON, but not a file of n-best lists"),
        ([1], "list 1 is damaged: .*valid dictionary"),
        ({"hypotheses": []}, "line 1 is damaged: 'hypotheses': list should have at least 1 item"),
        ({"hypotheses": ["the cat"]}, r"line 1 is damaged: 'hypotheses\.0': input should be a valid dictionary"),
        ({"hypotheses": [{"text": "x", "score": 1}, {"text": "x"}]}, r"'hypotheses\.1\.score' is missing"),
        ({"hypotheses": [{"text": "x", "score": "-1"}]}, r"'hypotheses\.0\.score': input should be a valid number"),
        ('{"hypotheses": [{"text": "x", "score": NaN}]}', r"'hypotheses\.0\.score': input should be a finite number"),
        ('{"hypotheses": [{"text": "x", "score": -Infinity}]}', r"'hypotheses\.0\.score': input should be a finite number"),
        ({"reference": ["x"], "hypotheses": [{"text": "x", "score": 1}]}, "'reference': input should be a valid string"),
        ('{"hypotheses": [{"text": "x", "score": 1}]}\n{"id": 2}', "line 2 is damaged: 'hypotheses' is missing"),
        ({"utts": {"u1": {"output": [{"text": "ref"}]}}}, "utterance u1 is damaged: it has no 'rec_text'"),
        ({"utts": {"u1": {}}}, "utterance u1 is damaged: it has no 'output'"),
        ({"utts": {"u1": {"output": 5}}}, "utterance u1 is damaged"),
        ({"utts": {"u1": {"output": {"rec_text": "x"}}}}, "utterance u1 is damaged"),
        ({"utts": {"u1": 5}}, "utterance u1 is damaged"),
        ({"hypotheses": [{"text": "x", "score": 10**400}]}, r"'hypotheses\.0\.score': input should be a"),
        ({"hypotheses": [{"text": "x", "score": -(10**400)}]}, r"'hypotheses\.0\.score': input should be a"),
        (f'{{"hypotheses": [{{"text": "x", "score": {"1" * 5000}}}]}}', "not JSON: .*4300 digits"),
        (f'[{{"hypotheses": [{{"text": "x", "score": {"1" * 5000}}}]}}]', "not JSON: .*4300 digits"),
        ('{"id": 1}\n{"id": 2, "hypotheses": []}', "line 1 is damaged: 'hypotheses' is missing"),
        ('\n{"id": 1}\n{"id": 2, "hypot', "line 2 is damaged: 'hypotheses' is missing"),
        ('{"a":\n1}', "is JSON, but not a file of n-best lists"),
        ('{"hypotheses":\n[}', "line 2: not JSON"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said) as caught:
        read_nbest(written(tmp_path / "lists.jsonl", content))
    assert "lists.jsonl" in caught.value.message


def test_an_id_stays_what_it_is(tmp_path: Path) -> None:
    ids = [1.5, 7, "7", True, None, {"a": 1}]
    lines = [json.dumps({"id": each, "hypotheses": [{"text": "x", "score": 1}]}) for each in ids]
    found = [each.id for each in read_nbest(written(tmp_path / "a.jsonl", "\n".join(lines)))]
    assert found == ["1.5", 7, "7", 4, 5, 6]


def test_half_a_surrogate_pair_becomes_a_character_that_can_be_written(tmp_path: Path) -> None:
    line = '{"id": "\\ud83d", "reference": "a\\ud83d", "hypotheses": [{"text": "\\ude00b", "score": 1}]}'
    (found,) = read_nbest(written(tmp_path / "a.jsonl", line))
    assert found == NBest("\ufffd", (Hypothesis("\ufffdb", 1.0),), "a\ufffd")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        read_nbest(tmp_path / "nowhere.jsonl")
