"""What the top of a page says, and how entities are marked in a text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from discern.diagnosis.health import Finding
from discern.model_files.run import COUNTS_FILE
from discern.report.finetuned_page import task_verdict
from discern.report.page import Page, TaggedTexts, entity_pieces, render_page
from discern.report.run_page import how_good, report, run_verdict
from discern.storage.checksums import write_recorded
from tests.small.run import make_run

WORDS = "Ann Lee went to New York and Paris on Monday".split()
RECORD: dict[str, Any] = {
    "words": WORDS,
    "tags": [],
    "gold": [],
    "spans": [[0, 2, "PER"], [5, 6, "LOC"], [7, 8, "ORG"], [9, 10, "LOC"]],
    "invented": [[5, 6, "LOC"], [7, 8, "ORG"], [9, 10, "LOC"]],
    "missed": [[4, 6, "LOC"], [7, 8, "LOC"]],
}


def test_entities_are_marked_in_the_text_with_what_went_wrong() -> None:
    pieces = entity_pieces(RECORD)
    assert "".join(piece.text + piece.after for piece in pieces) == " ".join(WORDS)
    assert [(piece.text, piece.outcome, piece.label) for piece in pieces if piece.outcome] == [
        ("Ann Lee", "right", "PER"),
        ("New", "missed", "LOC missed"),
        ("York", "right", "LOC"),  # its boundary is wrong, not its name
        ("Paris", "confused", "ORG, not LOC"),
        ("Monday", "invented", "LOC invented"),
    ]


def test_chinese_has_no_blanks() -> None:
    record = {"words": list("我在北京ok"), "spans": [[2, 4, "LOC"]], "invented": [], "missed": []}
    assert "".join(piece.text + piece.after for piece in entity_pieces(record)) == "我在北京o k"


def test_tags_of_single_words_are_marked_where_they_are_wrong() -> None:
    record = {"words": ["time", "flies", "fast"], "gold": ["NN", "VB", "RB"], "tags": ["NN", "NNS", "RB"]}
    assert [(piece.text, piece.label) for piece in entity_pieces(record) if piece.outcome] == [("flies", "NNS, not VB")]


def test_the_page_begins_with_the_verdict_and_escapes_what_it_shows() -> None:
    record = {"words": ["<b>Ann</b>", "went"], "spans": [[0, 1, "<i>"]], "invented": [[0, 1, "<i>"]], "missed": []}
    page = Page("t", [("fact", "1")], (), verdict=["It is good & small."], tagged=[TaggedTexts("Worst", [entity_pieces(record)])])
    html = render_page(page)
    assert html.index("It is good &amp; small.") < html.index("<dt>fact</dt>")
    assert '<span class="entity invented">&lt;b&gt;Ann&lt;/b&gt;<small>&lt;i&gt; invented</small></span> went' in html


def test_a_verdict_on_a_run() -> None:
    figures = {"discriminator_auc": 0.737, "discriminator_precision": 0.595, "discriminator_recall": 0.078}
    fine = Finding("discriminator_auc", 0.737, (0.55, 1.0), "fine", "", "")
    (said, usual) = run_verdict(2000, 2000, figures | {"generator_accuracy": 0.25}, [fine])
    assert "tells replaced tokens from original ones clearly (AUC 0.737; 0.5 is guessing)" in said
    assert "marks 8% of the replaced tokens, and 60% of the tokens it marks were replaced" in said
    assert "The generator predicts 25% of the masked tokens correctly." in said
    assert usual == "All metrics are within their usual ranges."
    assert len(run_verdict(2000, 2000, figures, [])) == 1, "nothing was compared with what is usual"
    copying = run_verdict(2000, 2000, {"mlm_accuracy": 0.93, "masked_accuracy": 0.31}, [])
    assert copying == ["The network predicts 31% of the masked tokens correctly."]
    ill = Finding("discriminator_recall", 0.0, (0.02, 1.0), "low", "it predicts 'original' everywhere", "a lower rate")
    assert run_verdict(2000, 2000, figures, [ill])[1] == "Unusual: it predicts 'original' everywhere. Try a lower rate."
    early = Finding("discriminator_recall", 0.0, (0.02, 1.0), "unknown", "too early to tell at step 209")
    found = run_verdict(209, 22_000, figures, [early])
    assert found[0].startswith("Step 209 of 22,000. ")
    assert found[-1] == "It is too early for a verdict."
    assert "no evaluation during training yet" in run_verdict(5, 10, {}, [])[0]


def test_a_verdict_on_a_task() -> None:
    entry: dict[str, Any] = {
        "metric": "accuracy",
        "median": 0.8125,
        "examples": 320,
        "split": "dev",
        "metrics": {"accuracy": 0.8125},
        "baselines": {"majority": {"title": "the most frequent class", "metrics": {"accuracy": 0.5}}},
        "best_baseline": "majority",
        "comparison": {"metric": "accuracy", "difference": 0.3125, "interval": [0.25, 0.37], "verdict": "better"},
        "interval": [0.766, 0.851],
    }
    mistakes = [{"gold": "bad", "label": "good"}] * 3 + [{"gold": "good", "label": "bad"}]
    score, confusion = task_verdict("own", entry, mistakes)
    assert score == (
        "own: accuracy 0.812 on 320 examples (dev, 95 % interval 0.766 to 0.851). The model beats the most frequent class "
        "(accuracy 0.5000): the difference is +0.3125, 95 % interval +0.2500 to +0.3700."
    )
    assert confusion == "The most frequent mistake: 'bad' predicted as 'good' (3 of 4 mistakes)."
    (_, confusion) = task_verdict("own", entry, mistakes * 2500)
    assert confusion == "The most frequent mistake: 'bad' predicted as 'good' (7,500 of the worst 10,000 mistakes)."
    spans = entry | {"metrics": {"f1": 0.4, "precision": 0.6, "recall": 0.3}, "comparison": None}
    assert task_verdict("own", spans | {"interval": None}, [])[0] == "own: accuracy 0.812 on 320 examples (dev)."
    assert task_verdict("own", spans, [RECORD])[1:] == [
        "It finds 30% of the spans, and 60% of the spans it marks are correct.",
        "Most often missed: LOC (2 of 2 missed spans).",
    ]
    assert task_verdict("own", spans, [RECORD] * 10_000)[2].endswith("missed spans in the worst 10,000 mistakes).")
    assert "no seed has a score" in task_verdict("own", entry | {"median": None}, [])[0]


def test_the_last_evaluation_is_compared_with_guessing_and_with_what_is_usual() -> None:
    metrics = {"discriminator_accuracy": 0.953, "replaced_fraction": 0.113}
    findings = [
        Finding("generator_gain", 1.25, (0.1, float("inf")), "fine", ""),
        Finding("discriminator_recall", 0.0, (0.02, 1.0), "low", ""),
        Finding("replaced_fraction", 0.1, (0.06, 0.15), "unknown", "too early to tell"),
    ]
    assert how_good(metrics, findings) == (
        "Held out, it classifies 95.3% of the tokens correctly (always answering 'original': 88.7%), it predicts words 1.25 nats "
        "better than word frequencies alone, and 1 of 2 diagnosed metrics are in their usual range."
    )
    worse = [Finding("mlm_gain", -0.05, (0.1, float("inf")), "low", "")]
    assert "predicts words 0.05 nats worse than word frequencies alone" in how_good({}, worse)
    assert how_good({}, []) == ""


def test_a_run_that_predicts_words_no_better_than_their_frequencies(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=mlm"])
    write_recorded(tmp_path / "run", {"metrics.jsonl": json.dumps({"step": 5, "tokens": 100, "heldout_mlm_loss": 9.0}) + "\n"})
    entries = json.loads((tmp_path / "run" / "run.json").read_text())["vocab_size"]
    write_recorded(tmp_path / "run", {COUNTS_FILE: "".join(f"{number}\n" for number in range(entries))})
    page = report(tmp_path / "run", None).read_text()
    assert re.search(r"it predicts words \d\.\d\d nats worse than word frequencies alone", page)
