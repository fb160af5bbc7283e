"""Batch and length schedules: the sizes of the steps by hand, the stream of rows, resume and FLOPs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from discern.config.resolve import InvalidConfigError, Origin, Resolved, Setting, collect, parse_overrides
from discern.config.schema import ScheduleSegment, to_toml
from discern.data.batching.rows import scheduled_rows, training_rows
from discern.data.config import DataConfig
from discern.errors import ConfigError
from discern.objectives import objectives
from discern.training import checkpoint
from discern.training.config import (
    PretrainConfig,
    StepSizes,
    TrainConfig,
    load_pretrain_config,
    resolve_pretrain_config,
    step_sizes,
)
from discern.training.flops import run_flops, step_flops
from discern.training.loop import train
from discern.training.prefetch import read_local_batch
from discern.training.state import State, TrainContext
from tests.support import MODELS, SPECIAL, settings
from tests.training.test_loop import SPLIT, context

BATCH = ((0, 96), (3, 192))  # 4 rows of 24 in steps 0 to 2, then 8
LENGTHS = ((0, 12), (4, 24))
SEGMENTS = (ScheduleSegment(0, 8, 12), ScheduleSegment(3, 16, 12, 24, 288), ScheduleSegment(4, 8, 24, 40, 480))


def scheduled(
    folder: Path, name: str = "rtd", *, lengths: Any = LENGTHS, config: Any = None, model: Any = None, **options: Any
) -> TrainContext:
    """A run whose batch and rows grow."""
    in_slots = name == "permutation-lm"
    factory = objectives.load(name)
    built = factory.Config(**({"memory_length": 8} if in_slots else {}) | (config or {}))
    objective = factory(built, settings(**MODELS.get(name, {}) | (model or {})))
    objective.initialize(0)
    data = DataConfig(sequence_length=24, length_schedule=lengths, packing="two-part" if in_slots else "segments")
    run = context(folder, objective, **{"batch_schedule": BATCH, "max_steps": 8} | options)
    sizes = step_sizes(run.train, data)
    return replace(run, sizes=sizes, source=scheduled_rows([SPLIT], SPECIAL, data, 0, sizes.segments, in_slots=in_slots))


def test_the_sizes_by_hand() -> None:
    data = DataConfig(sequence_length=24, length_schedule=LENGTHS)
    sizes = step_sizes(TrainConfig(batch_schedule=BATCH, sequences_per_step=8), data)
    # 96 tokens a step are 8 rows of 12. The batch grows at step 3, the rows at step 4.
    assert sizes.segments == SEGMENTS
    assert [sizes.at(step).rows for step in range(6)] == [8, 8, 8, 16, 8, 8]
    assert [sizes.examples_before(step) for step in range(7)] == [0, 8, 16, 24, 40, 48, 56]
    assert [sizes.positions_before(step) for step in (0, 3, 4, 6)] == [0, 288, 480, 864]
    assert [step for step in range(10) if sizes.changes_at(step)] == [3, 4]
    # A schedule of lengths alone keeps the tokens of an update: 256.
    growing = step_sizes(
        TrainConfig(sequences_per_step=4, max_steps=16), DataConfig(sequence_length=64, length_schedule=((0, 16), (0.5, 64)))
    )
    assert growing.segments == (ScheduleSegment(0, 16, 16), ScheduleSegment(8, 4, 64, 128, 2048))
    assert step_sizes(TrainConfig(sequences_per_step=4), DataConfig()) == StepSizes((ScheduleSegment(0, 4, 128),))


def test_a_growing_batch_reads_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    run = scheduled(tmp_path, lengths=(), micro_batch_size=2)
    constant = training_rows(SPLIT, SPECIAL, DataConfig(sequence_length=24), 0)
    batches = [read_local_batch(run, step).micro_batches for step in range(8)]
    assert [len(parts) for parts in batches] == [2] * 3 + [4] * 5
    rows = torch.cat([part.tokens.input_ids for parts in batches for part, _ in parts])
    assert torch.equal(rows, constant.batch(np.arange(52), np.arange(52)).input_ids)
    shorter = scheduled(tmp_path, micro_batch_size=2)
    assert [len(read_local_batch(shorter, step).micro_batches) for step in (0, 3, 4)] == [2, 4, 4], (
        "two rows of 24 are four of 12"
    )


@pytest.mark.parametrize("packing", ["segments", "packed"])
def test_after_a_change_of_length_every_row_is_read_once_per_epoch(packing: Any) -> None:
    data = DataConfig(sequence_length=24, length_schedule=LENGTHS, packing=packing)
    rows = scheduled_rows([SPLIT], SPECIAL, data, 0, step_sizes(TrainConfig(sequences_per_step=4), data).segments, in_slots=False)
    (short,), (long,) = rows.streams
    assert long.num_rows < short.num_rows
    # 4 steps of 96 tokens: 32 short rows. The long ones begin at that fraction of the epoch.
    begin = -(-32 * long.num_rows // short.num_rows)
    first = rows.batch(np.arange(32, 40), np.arange(8))
    assert torch.equal(first.input_ids, long.batch(np.arange(begin, begin + 8), np.arange(8)).input_ids)
    assert rows.batch(np.arange(24, 32), np.arange(8)).input_ids.shape == (8, 12)
    left = long.num_rows - begin
    epoch = rows.batch(np.arange(32 + left, 32 + left + long.num_rows), np.zeros(long.num_rows, np.int64))
    assert Counter(epoch.example_index.tolist()) == Counter(range(long.num_rows, 2 * long.num_rows))
    assert rows.epochs(32 + 5 * long.num_rows) == [pytest.approx(32 / short.num_rows + 5)]


@pytest.mark.parametrize(
    ("name", "model"), [("rtd", {"encoder": "modernbert", "local_window": 8}), ("electric", {}), ("permutation-lm", {})]
)
def test_a_run_resumes_bit_for_bit_across_the_changes(tmp_path: Path, name: str, model: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": model, "max_steps": 5}
    train(scheduled(tmp_path, name, checkpoint_every_steps=1, keep_checkpoints=9, **options), State())
    expected = checkpoint.load(tmp_path / "checkpoints" / "step-00000005")
    for cut in (3, 4):  # at both changes
        contents = checkpoint.load(tmp_path / "checkpoints" / f"step-{cut:08}")
        if name == "permutation-lm":  # a memory is dropped where the slots change
            assert len(contents.carry) == {3: 8, 4: 16}[cut]
            assert all(memory.any() for memory in contents.carry.values())
        again = scheduled(tmp_path / str(cut), name, **options)
        checkpoint.load_model_tensors(again.objective, contents.model, "here")
        again.objective.load_carry_state(contents.carry)
        train(again, State.from_checkpoint(contents))
        resumed = checkpoint.load(tmp_path / str(cut) / "checkpoints" / "step-00000005")
        assert resumed.state["tokens"] == expected.state["tokens"]
        for part in ("model", "optimizer", "carry"):
            left, right = getattr(expected, part), getattr(resumed, part)
            assert left.keys() == right.keys()
            assert all(torch.equal(left[key], right[key]) for key in left), (part, cut)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rtd", {"algorithm": "two-stage", "two_stage_steps": 3.0, "generator_size": 1.0, "tying": "none"}),
        ("mlm", {"mask_probability": 0.4, "mask_probability_end": 0.1, "mask_probability_steps": 8}),
    ],
)
def test_flops_of_schedules_are_those_of_their_steps(name: str, options: dict[str, Any]) -> None:
    factory = objectives.load(name)
    with torch.device("meta"):
        objective = factory(factory.Config(**options), settings())
    steps = [
        step_flops(objective, replace(phase, begins=step, steps=1), segment.length, segment.rows).executed
        for phase in objective.phases(8)
        for step in range(phase.begins, phase.begins + phase.steps)
        for segment in [StepSizes(SEGMENTS).at(step)]
    ]
    flops = run_flops(objective, 8, StepSizes(SEGMENTS))
    assert flops.total.executed == pytest.approx(sum(steps), rel=1e-4)  # of a mask rate a hundred points are summed
    assert flops.after(4).executed == pytest.approx(sum(steps[:4]), rel=1e-4)


def resolved(base: str, *overrides: str) -> Resolved[PretrainConfig]:
    """The configuration of a preset with the lines `base`; the user's values are `overrides`."""
    origin = Origin("preset", "preset test")
    preset = {key: Setting(setting.value, origin) for key, setting in parse_overrides(base.split(";")).items()}
    return resolve_pretrain_config(collect("tiny", None, ()) | preset | parse_overrides(overrides))


SIZES = "train.max_steps=1000;data.sequence_length=64;train.sequences_per_step=4;"
GROWING, LONGER = SIZES + "train.batch_schedule=[[0,512],[0.5,1024]]", SIZES + "data.length_schedule=[[0,32],[0.5,64]]"


def test_the_number_of_sequences_is_that_of_the_last_segment(tmp_path: Path) -> None:
    of_preset = resolved(GROWING)
    assert of_preset.config.train.sequences_per_step == 16
    assert of_preset.origins["train.sequences_per_step"] == "preset test, the last of train.batch_schedule"
    # A written configuration, which has both, can be read.
    (tmp_path / "config.toml").write_text(to_toml(of_preset.config))
    assert load_pretrain_config(tmp_path / "config.toml", None).config == of_preset.config


def test_a_size_that_the_user_sets_turns_the_schedule_of_a_preset_off() -> None:
    batch = resolved(GROWING, "train.sequences_per_step=8")
    assert (batch.config.train.sequences_per_step, batch.config.train.batch_schedule) == (8, ())
    assert batch.origins["train.batch_schedule"].endswith("off because of train.sequences_per_step")
    shorter = resolved(LONGER, "data.sequence_length=48")
    assert (shorter.config.data.sequence_length, shorter.config.data.length_schedule) == (48, ())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("train.batch_schedule=[[10,96]]", "begins at 10; its first segment must begin at 0"),
        ("train.batch_schedule=[[0,96],[50,192],[50,384]]", "each must begin after the one before"),
        ("train.batch_schedule=[[0,96],[50,96]]", "each must be larger than the one before"),
        ("data.length_schedule=[[0,4],[50,24]]", "the first at least 8"),
        ("data.length_schedule=[[0,11],[50,24]];data.packing=two-part", "an even sequence_length of at least 10, not 11"),
        (
            "train.batch_schedule=[[0,512],[500,1024]];train.sequences_per_step=8",
            "ends with 16, but train.sequences_per_step is 8",
        ),
        ("data.length_schedule=[[0,32],[500,64]];data.sequence_length=32", "ends with 64, but data.sequence_length is 32"),
        ("data.length_schedule=[[0,32],[500,128]];model.max_positions=64", "128, beyond model.max_positions, which is 64"),
        ("train.batch_schedule=[[0,32],[10,1024]]", "an update of 32 tokens cannot hold a row of 64"),
        ("train.batch_schedule=[[0,512],[0.5,1024]];train.max_hours=1", "has a fraction of the run, and the number"),
    ],
)
def test_schedules_that_do_not_grow_or_contradict_a_size_are_refused(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved("data.sequence_length=64;train.max_steps=1000", *overrides.split(";"))


SCHEDULED = "train.batch_schedule=[[0,512],[@,1024]];data.length_schedule=[[0,16],[@,32]]"
CHANGING = "optimizer.warmup_steps=@;objective.temperature_steps=@;objective.mask_probability_steps=@"
TWO_STAGE = "objective.algorithm=two-stage;objective.copy_weights=false;objective.two_stage_steps=@"
SEPARATE = ["objective.freeze_generator_at=@", "objective.generator_warmup_steps=@", TWO_STAGE]


@pytest.mark.parametrize("points", [f"{SCHEDULED};{CHANGING}", *SEPARATE])
def test_a_point_in_a_run_is_a_fraction_or_a_step_within_it(points: str) -> None:
    base = "objective.tying=none;objective.temperature_end=0.5;objective.mask_probability_end=0.3;optimizer.warmup_steps=0"
    base += ";objective.temperature_steps=1;objective.mask_probability_steps=1;train.max_steps=1000"
    fractions, steps = (points.replace("@", value).split(";") for value in ("0.4", "400"))
    run = resolved(base, *fractions)
    assert run.config == resolved(base, *steps).config
    with pytest.raises(InvalidConfigError) as caught:
        resolved(base, "train.max_steps=100", *steps)
    for key in (point.partition("=")[0] for point in steps if "400" in point):
        assert run.origins[key].endswith("of train.max_steps")
        assert f"{key} names step 400, which is not within the 100 steps" in str(caught.value)
