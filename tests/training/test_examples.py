"""The rows that an evaluation keeps for people to look at."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from discern.corruption.randomness import Randomness
from discern.objectives import objectives
from discern.training.evaluation import ExampleRows
from discern.training.metrics import EXAMPLES_FILE, MetricsLog
from tests.support import make_batch, settings

BATCH = make_batch([[2, *range(5, 25), 3], [2, *range(30, 36), 3]])


def test_the_first_rows_are_kept_with_what_the_discriminator_said() -> None:
    kind = objectives.load("rtd")
    objective = kind(kind.Config(mask_probability=0.5), settings())
    objective.initialize(0)
    objective.eval()
    randomness = Randomness(0, 0, BATCH.example_index)
    corrupted = objective.corrupt(BATCH, randomness)
    with torch.no_grad():
        output = objective(corrupted, randomness)
    examples = ExampleRows()
    examples.update(output, corrupted)
    examples.update(output, corrupted)
    assert [row["original"] for row in examples.rows] == [[2, *range(5, 25), 3], [2, *range(30, 36), 3]]
    for row, ids, logits in zip(
        examples.rows, output.observations["corrupted_ids"], output.observations["discriminator_logits"], strict=True
    ):
        count = len(row["original"])
        assert row["corrupted"] == ids[:count].tolist() != row["original"]
        torch.testing.assert_close(torch.tensor(row["probability"]), logits[:count].sigmoid(), atol=6e-4, rtol=0)


def test_examples_of_steps_that_are_repeated_are_dropped(tmp_path: Path) -> None:
    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in (tmp_path / EXAMPLES_FILE).read_text().splitlines()]

    log = MetricsLog(tmp_path, 0)
    log.write_examples(10, [])
    assert not (tmp_path / EXAMPLES_FILE).exists()
    for step in (10, 20, 30):
        log.write_examples(step, [{"original": [1]}])
    log.close()
    MetricsLog(tmp_path, 10).close()
    assert steps() == [10]
