"""`discern report` on runs made by hand, and what it says about them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from discern.diagnosis.health import Finding
from discern.errors import ConfigError, DataError
from discern.inference.detection import Detection
from discern.report.run_page import report
from discern.report.verdict import run_verdict
from discern.storage.checksums import write_recorded
from tests.report.test_metrics import MLM, RTD
from tests.report.test_page import assert_stands_alone, structure
from tests.small.run import make_run

DETECTED = Detection("The <b>chef</b>", ["the", "chef"], [(0, 3), (7, 11)], [0.25, 0.75])
EXAMPLE = {"original": [2, 7, 9], "corrupted": [2, 8, 9], "probability": [0.0, 0.75, 0.25]}


LINE = {"step": 1, "tokens": 50, "seconds": 600.0, "peak_memory_bytes": 2**30}


@pytest.mark.parametrize(
    ("overrides", "line", "shown"),
    [
        ([], RTD, ["replaced token detection", "Generator", "Discriminator AUC", "0.7000", "Before and after"]),
        (["train.max_hours=0.001"], {}, ["Steps: 1 in 10 minutes."]),
        (["objective.name=mlm"], MLM, ["masked language modeling", "Encoder", "nats worse than word frequencies alone"]),
        (["train.max_steps=9"], {}, ["Steps: 1 of 9. There is no evaluation", "There are no held-out metrics"]),
    ],
)
def test_a_run_has_a_page(overrides: list[str], line: dict[str, float], shown: list[str], tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=overrides, metrics=[LINE | line])
    examples = [{"step": step, "rows": [EXAMPLE]} for step in (10, 20)]
    (tmp_path / "run" / "examples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in examples))
    path = report(tmp_path / "run", None, [DETECTED])
    assert path == tmp_path / "run" / "report.html"
    html = path.read_text(encoding="utf-8")
    assert_stands_alone(html)
    structure(html)
    for text in [*shown, "&lt;b&gt;", 'title="0.750">chef</span>', "1,611 documents", "[objective]", "At step 20"]:
        assert text in html, text
    assert str(tmp_path) not in html
    again = report(tmp_path / "run", tmp_path / "again.html", [DETECTED])
    assert again.read_bytes() == path.read_bytes()


def test_what_cannot_be_shown_or_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run"):
        report(tmp_path, None)
    make_run(tmp_path / "run", metrics=[])
    with pytest.raises(DataError, match="nothing to show yet"):
        report(tmp_path / "run", None)
    write_recorded(tmp_path / "run", {"metrics.jsonl": json.dumps(LINE) + '\n{"step": 2, "lo'})
    with pytest.raises(ConfigError, match="is a folder"):
        report(tmp_path / "run", tmp_path)
    (tmp_path / "run" / "examples.jsonl").write_text('{"step": 1, "rows": [{"original": [99999999999999999999]}]}\n')
    with pytest.raises(DataError, match=r"examples\.jsonl is damaged") as caught:
        report(tmp_path / "run", None)
    assert "remove it" in str(caught.value.hint)


AUC = {"discriminator_auc": 0.737}
FINE = Finding("discriminator_auc", 0.737, (0.55, 1.0), "fine", "AUC 0.74 is good")
ILL = Finding("discriminator_recall", 0.0, (0.02, 1.0), "low", "it predicts 'original' everywhere", "a lower rate")


@pytest.mark.parametrize(
    ("metrics", "findings", "said"),
    [
        ({}, [], ["There is no evaluation during training yet."]),
        (AUC, [FINE], ["AUC 0.74 is good.", "All diagnosed metrics are within their usual ranges."]),
        (AUC, [replace(FINE, verdict="unknown")], ["AUC 0.74 is good."]),
        (AUC | {"generator_accuracy": 0.25}, [], ["The generator predicts 25% of the hidden tokens correctly."]),
        # `all-tokens-mlm` copies most tokens.
        (
            {"mlm_accuracy": 0.93, "masked_accuracy": 0.31},
            [],
            ["The network predicts 31% of the hidden tokens correctly."],
        ),
        (
            {"discriminator_accuracy": 0.9, "replaced_fraction": 0.113},
            [],
            ["Held out, it classifies 90.0% of the tokens correctly (always answering 'original': 88.7%)."],
        ),
        # A network that is ill is not praised, and an early one is not judged.
        (AUC, [ILL, FINE], ["", "Unusual: it predicts 'original' everywhere. Try a lower rate."]),
        (AUC, [replace(FINE, verdict="unknown", early=True)], ["", "It is too early for a verdict."]),
    ],
)
def test_a_verdict_on_a_run(metrics: dict[str, float], findings: list[Finding], said: list[str]) -> None:
    first, *others = said
    assert run_verdict("Steps: 9.", metrics, findings) == [f"Steps: 9. {first}".strip(), *others]
