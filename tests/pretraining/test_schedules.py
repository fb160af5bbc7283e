"""`discern pretrain` with a batch and rows that grow: the plan, the records, and a run that is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from discern.artifacts.opening import open_model
from discern.artifacts.run import build_objective, vocabulary_of
from discern.data.dataset.shards import TokenData
from discern.errors import ConfigError
from discern.pretraining.estimate import estimate
from discern.pretraining.run import Replay, check_shares, plan, pretrain, training_stream
from discern.pretraining.warm_start import start_config
from discern.progress import Silent
from discern.training import checkpoint
from discern.training.distributed import Ranks
from discern.training.flops import step_flops
from discern.training.metrics_log import read_metrics
from discern.training.pretrain_config import load_pretrain_config
from tests.data.small_text import write_vocabulary
from tests.pretraining.test_evaluate import prepared

# 4 rows of 16 in steps 0 to 3, then 8 of 16, and 4 of 32 from step 8 on.
SCHEDULES = [
    "train.batch_schedule=[[0, 64], [4, 128]]",
    "data.length_schedule=[[0, 16], [8, 32]]",
    "train.max_steps=12",
    "data.packing=packed",
    "train.log_every_steps=1",
    "train.checkpoint_every_steps=8",
    "optimizer.warmup_steps=2",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schedules")
    return prepared(folder / "data", write_vocabulary(folder / "vocab.txt"))


def run(data: Path, out: Path, *overrides: str, **options: Any) -> dict[str, Any] | None:
    return pretrain(data=data, out=out, preset="tiny", overrides=[*SCHEDULES, *overrides], progress=Silent(), **options)


def test_the_plan_and_the_records_count_each_step_as_it_is(data: Path, tmp_path: Path) -> None:
    estimated = estimate(plan(data=data, out=tmp_path / "out", preset="tiny", overrides=SCHEDULES, warn=pytest.fail)).values
    config, opened = load_pretrain_config(None, "tiny", SCHEDULES).config, TokenData.open(data)
    assert config.train.sequences_per_step == 4
    with torch.device("meta"):
        objective = build_objective(config, vocabulary_of(opened))
    phase = objective.phases(12)[0]
    sizes = [(16, 4)] * 4 + [(16, 8)] * 4 + [(32, 4)] * 4
    flops = [step_flops(objective, phase, length, rows).executed for length, rows in sizes]
    assert estimated["flops"] == pytest.approx(sum(flops))
    streams = training_stream(opened, config).streams  # type: ignore[attr-defined]
    assert estimated["epochs"] == pytest.approx(48 / streams[0].num_rows + 16 / streams[1].num_rows)
    run(data, tmp_path / "run")
    records = [record for record in read_metrics(tmp_path / "run") if "tokens" in record]
    assert [record["flops"] for record in records] == [round(sum(flops[: step + 1])) for step in range(12)]
    tokens = [record["tokens"] for record in records]
    read = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
    assert all(0.7 * rows * length < count <= rows * length for count, (length, rows) in zip(read, sizes, strict=True)), read


def test_a_run_that_is_continued_equals_one_in_a_piece(data: Path, tmp_path: Path) -> None:
    for steps in (8, 12):  # the rows change after step 8
        run(data, tmp_path / "parts", f"train.max_steps={steps}", "optimizer.schedule=constant")
    run(data, tmp_path / "constant", "optimizer.schedule=constant")
    ends = [checkpoint.load(tmp_path / name / "checkpoints" / "step-00000012").model for name in ("parts", "constant")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_a_decay_from_a_checkpoint_keeps_the_schedule_of_the_run(data: Path, tmp_path: Path) -> None:
    # The decay ends before the last segment begins: in a new run that would be refused.
    run(data, tmp_path / "stable", "optimizer.schedule=constant", "train.checkpoint_every_steps=4", "train.keep_checkpoints=9")
    start = tmp_path / "stable" / "checkpoints" / "step-00000004"
    pretrain(data=data, out=tmp_path / "decayed", decay_from=start, overrides=["optimizer.decay_steps=2"], progress=Silent())
    records = {name: read_metrics(tmp_path / name) for name in ("stable", "decayed")}
    assert [line["tokens"] for line in records["decayed"]] == [line["tokens"] for line in records["stable"]][:6]
    with pytest.raises(ConfigError, match=r"data\.length_schedule names step 8, which is not within the 6 steps"):
        run(data, tmp_path / "short", "train.max_steps=6")


def test_rows_that_the_processes_cannot_share_are_refused() -> None:
    config = load_pretrain_config(None, "tiny", SCHEDULES).config
    check_shares(config, Ranks(0, 4, torch.device("cpu")))
    with pytest.raises(
        ConfigError, match="the 4 rows of 16 in an update of 64 tokens cannot be divided evenly among 8 processes"
    ):
        check_shares(config, Ranks(0, 8, torch.device("cpu")))


def test_a_resumed_run_may_end_before_the_last_segment_of_its_batch(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path)
    shorter = [*SCHEDULES, "train.max_steps=3"]
    resolved = plan(data=data, out=tmp_path, preset="tiny", overrides=shorter, warn=pytest.fail)
    assert resolved.config.train.batch_schedule == ((0, 64), (4, 128))
    with pytest.raises(ConfigError, match="batch_schedule names step 4, which is not within the 3 steps"):
        plan(data=data, out=tmp_path.parent / "new", preset="tiny", overrides=shorter, warn=pytest.fail)


def test_slots_that_fill_no_micro_batch_are_one() -> None:
    growing = "train.batch_schedule=[[0, 8192], [0.1, 131072]]"
    assert load_pretrain_config(None, "xlnet-base", [growing]).config.train.micro_batch_size == 32
    with pytest.raises(ConfigError, match="the 48 slots of 48 rows of 512 in an update are not a multiple"):
        load_pretrain_config(None, "xlnet-base", ["train.batch_schedule=[[0, 24576], [0.1, 131072]]"])


def test_a_new_run_from_the_weights_keeps_the_last_sizes(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", "objective.masking=entropy")
    start = open_model(tmp_path / "run", warn=pytest.fail)
    config = start_config(start, vocabulary_of(TokenData.open(data)), None, None, [], None).config
    assert (config.train.batch_schedule, config.data.length_schedule) == ((), ())
    assert (config.train.sequences_per_step, config.data.sequence_length) == (4, 32)
    with pytest.raises(ConfigError, match=r"--replay mixes rows of one length, but data\.length_schedule changes it"):
        plan(
            data=data,
            out=tmp_path / "more",
            init_from=tmp_path / "run",
            overrides=["data.length_schedule=[[0, 16], [8, 32]]"],
            replay=Replay(data, 0.5),
            warn=pytest.fail,
        )
