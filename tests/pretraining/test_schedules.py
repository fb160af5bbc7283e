"""`discern pretrain` with a batch and rows that grow: the plan, the records, and what continues from the run."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from discern.data.dataset.shards import TokenData
from discern.errors import ConfigError
from discern.model_files.folder import open_model
from discern.model_files.run import build_objective, vocabulary_of
from discern.pretraining.estimate import estimate
from discern.pretraining.run import plan, pretrain, training_stream
from discern.pretraining.warm_start import start_config
from discern.progress import Silent
from discern.training.config import load_pretrain_config
from discern.training.flops import step_flops
from discern.training.metrics import read_metrics
from tests.data.small_text import write_vocabulary
from tests.pretraining.test_evaluate import prepared

# 4 rows of 16 in steps 0 to 3, then 8 of 16, and 4 of 32 from step 8 on.
SCHEDULES = [
    "train.batch_schedule=[[0, 64], [4, 128]]",
    "data.length_schedule=[[0, 16], [8, 32]]",
    "train.max_steps=12",
    "data.packing=packed",
    "train.log_every_steps=1",
    "train.checkpoint_every_steps=4",
    "train.keep_checkpoints=9",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=2",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schedules")
    return prepared(folder / "data", write_vocabulary(folder / "vocab.txt"))


@pytest.fixture(scope="module")
def stable(data: Path) -> Path:
    """A run to the end."""
    pretrain(data=data, out=data.parent / "stable", preset="tiny", overrides=SCHEDULES, progress=Silent())
    return data.parent / "stable"


def test_the_plan_and_the_records_count_each_step_as_it_is(data: Path, stable: Path, tmp_path: Path) -> None:
    estimated = estimate(plan(data=data, out=tmp_path / "out", preset="tiny", overrides=SCHEDULES, warn=pytest.fail)).values
    config, opened = load_pretrain_config(None, "tiny", SCHEDULES).config, TokenData.open(data)
    assert config.train.sequences_per_step == 4
    with torch.device("meta"):
        objective = build_objective(config, vocabulary_of(opened))
    sizes = [(16, 4)] * 4 + [(16, 8)] * 4 + [(32, 4)] * 4
    flops = [step_flops(objective, objective.phases(12)[0], length, rows).executed for length, rows in sizes]
    assert estimated["flops"] == pytest.approx(sum(flops))
    (short,), _, (long,) = training_stream(opened, config).streams
    assert estimated["epochs"] == pytest.approx(48 / short.num_rows + 16 / long.num_rows)
    records = [record for record in read_metrics(stable) if "tokens" in record]
    assert [record["flops"] for record in records] == [round(total) for total in accumulate(flops)]
    tokens = [record["tokens"] for record in records]
    read = [after - before for before, after in pairwise([0, *tokens])]
    assert all(0.7 * rows * length < count <= rows * length for count, (length, rows) in zip(read, sizes, strict=True)), read


def test_a_decay_from_a_checkpoint_keeps_the_schedule_of_the_run(data: Path, stable: Path, tmp_path: Path) -> None:
    # The decay ends before the last segment begins: in a new run that would be refused.
    start = stable / "checkpoints" / "step-00000004"
    pretrain(data=data, out=tmp_path / "decayed", decay_from=start, overrides=["optimizer.decay_steps=2"], progress=Silent())
    tokens = [[line["tokens"] for line in read_metrics(out)] for out in (stable, tmp_path / "decayed")]
    assert tokens[1] == tokens[0][:6]


@pytest.mark.parametrize(("steps", "setting"), [(6, r"data\.length_schedule names step 8"), (3, "batch_schedule names step 4")])
def test_only_a_resumed_run_may_end_before_the_last_segment(
    steps: int, setting: str, data: Path, stable: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": data, "preset": "tiny", "overrides": [*SCHEDULES, f"train.max_steps={steps}"]}
    assert plan(out=stable, warn=pytest.fail, **options).config.train.batch_schedule == ((0, 64), (4, 128))
    with pytest.raises(ConfigError, match=f"{setting}, which is not within the {steps} steps"):
        plan(out=tmp_path / "new", warn=pytest.fail, **options)


def test_slots_that_fill_no_micro_batch_are_one() -> None:
    growing = "train.batch_schedule=[[0, 8192], [0.1, 131072]]"
    assert load_pretrain_config(None, "xlnet-base", [growing]).config.train.micro_batch_size == 32
    with pytest.raises(ConfigError, match=r"48 rows of 512 in an update .* are not a multiple"):
        load_pretrain_config(None, "xlnet-base", ["train.batch_schedule=[[0, 24576], [0.1, 131072]]"])


def test_a_new_run_from_the_weights_keeps_the_last_sizes(data: Path, stable: Path) -> None:
    start = open_model(stable, warn=pytest.fail)
    config = start_config(start, vocabulary_of(TokenData.open(data)), None, None, [], None).config
    assert (config.train.batch_schedule, config.data.length_schedule) == ((), ())
    assert (config.train.sequences_per_step, config.data.sequence_length) == (4, 32)
