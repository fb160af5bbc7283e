"""Published scores: complete labels, and the values that everybody knows."""

from __future__ import annotations

import pytest

from discern.tasks.published import published_scores


def test_every_score_is_labeled() -> None:
    scores = published_scores()
    assert len(scores) > 250
    for score in scores:
        assert 0.4 < score.value < 1, score
        assert score.split in ("dev", "test", "test_leaderboard")
        assert score.seeds
        assert score.source
        assert score.flops is None or 1e16 < score.flops < 1e23
    keys = [(score.model, score.task, score.metric, score.split, score.source, score.note) for score in scores]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("model", "task", "split", "metric", "value"),
    [
        ("ELECTRA-Small", "glue", "dev", "average", 0.799),
        ("ELECTRA-Base", "glue", "dev", "average", 0.851),
        ("ELECTRA-Large 1.75M", "rte", "dev", "accuracy", 0.88),
        ("ELECTRA-Large 1.75M", "squad2", "test", "f1", 0.914),
        ("ELECTRA-Base", "squad1", "dev", "exact_match", 0.845),
        ("XLNet-Base", "mnli", "dev", "accuracy", 0.868),
        ("BERT-Large", "cola", "dev", "matthews", 0.606),
        ("ELECTRA-Large", "chunk", "test", "f1", 0.972),
    ],
)
def test_known_values(model: str, task: str, split: str, metric: str, value: float) -> None:
    found = {score.metric: score.value for score in published_scores(task, split, model)}
    assert found[metric] == pytest.approx(value)


def test_averages_are_those_of_their_rows() -> None:
    tasks = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
    checked = 0
    for average in published_scores("glue"):
        row = [
            score.value
            for task in tasks
            for score in published_scores(task, average.split, average.model)
            if score.source == average.source and score.note == average.note
        ]
        if len(row) == 8 and average.split != "test_leaderboard":
            assert sum(row) / 8 == pytest.approx(average.value, abs=0.0011), average
            checked += 1
    assert checked >= 15
