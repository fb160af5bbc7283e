"""Batch and length schedules: the sizes of the steps by hand, the stream of rows, resume, accumulation and FLOPs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from discern.config.layers import Origin, Setting, collect, parse_overrides
from discern.config.resolve import Resolved
from discern.config.schedule import ScheduleSegment
from discern.config.schema import to_toml
from discern.data.batching.rows import SuccessiveRows, scheduled_rows, training_rows
from discern.data.config import DataConfig
from discern.errors import ConfigError
from discern.objectives import objectives
from discern.objectives.base import Objective
from discern.training import checkpoint
from discern.training.config import TrainConfig
from discern.training.flops import run_flops, step_flops
from discern.training.loop import train
from discern.training.metrics_log import read_metrics
from discern.training.prefetch import read_local_batch
from discern.training.pretrain_config import PretrainConfig, load_pretrain_config, resolve_pretrain_config
from discern.training.schedule import StepSizes, step_sizes
from discern.training.state import State, TrainContext
from tests.support import MODELS, SPECIAL, settings
from tests.training.test_loop import SPLIT, context

BATCH = ((0, 96), (3, 192))  # 4 rows of 24 in steps 0 to 2, then 8
LENGTHS = ((0, 12), (4, 24))
ROWS: dict[str, dict[str, Any]] = {"permutation-lm": {"packing": "two-part"}}
OPTIONS: dict[str, dict[str, Any]] = {"permutation-lm": {"memory_length": 8}}


def scheduled(
    folder: Path,
    name: str = "rtd",
    batch: Any = BATCH,
    lengths: Any = LENGTHS,
    *,
    own: Any = None,
    model: Any = None,
    **options: Any,
) -> TrainContext:
    """A run whose batch and rows grow."""
    factory = objectives.load(name)
    config = factory.Config(**(OPTIONS.get(name, {}) | (own or {})))
    objective: Objective = factory(config, settings(**(MODELS.get(name, {}) | (model or {}))))
    objective.initialize(0)
    data = DataConfig(sequence_length=24, length_schedule=lengths, **ROWS.get(name, {}))
    options = {"batch_schedule": batch, "sequences_per_step": 8, "max_steps": 8} | options
    run = context(folder, objective, **options)
    sizes = step_sizes(run.train, data)
    in_slots = objective.config.reads_in_order  # type: ignore[attr-defined]
    source = scheduled_rows(SPLIT, SPECIAL, data, 0, sizes.segments, in_slots=in_slots)
    for key, value in {"sizes": sizes, "source": source}.items():
        object.__setattr__(run, key, value)
    return run


def test_the_sizes_by_hand() -> None:
    data = DataConfig(sequence_length=24, length_schedule=LENGTHS)
    sizes = step_sizes(TrainConfig(batch_schedule=BATCH, sequences_per_step=8), data)
    # 96 tokens a step are 8 rows of 12. The batch grows at step 3, the rows at step 4.
    assert sizes.segments == (ScheduleSegment(0, 8, 12), ScheduleSegment(3, 16, 12, 24, 288), ScheduleSegment(4, 8, 24, 40, 480))
    assert [sizes.at(step).rows for step in range(6)] == [8, 8, 8, 16, 8, 8]
    assert [sizes.examples_before(step) for step in range(7)] == [0, 8, 16, 24, 40, 48, 56]
    assert [sizes.positions_before(step) for step in (0, 3, 4, 6)] == [0, 288, 480, 864]
    assert [step for step in range(10) if sizes.changes_at(step)] == [3, 4]


def test_a_length_schedule_keeps_the_tokens_of_an_update() -> None:
    data = DataConfig(sequence_length=64, length_schedule=((0, 16), (0.5, 64)))
    sizes = step_sizes(TrainConfig(sequences_per_step=4, max_steps=16), data)  # 256 tokens a step
    assert sizes.segments == (ScheduleSegment(0, 16, 16), ScheduleSegment(8, 4, 64, 128, 2048))
    assert step_sizes(TrainConfig(sequences_per_step=4), DataConfig()) == StepSizes.constant(4, 128)


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("batch", [[10, 96]], "begins at 10; its first segment must begin at 0"),
        ("batch", [[0, 96], [50, 192], [50, 384]], "each must begin after the one before"),
        ("batch", [[0, 96], [50, 96]], "each must be larger than the one before"),
        ("length", [[0, 4], [50, 24]], "the first at least 8"),
        ("length", [[0, 24], [50, 12]], "each must be larger than the one before"),
        ("two-part", [[0, 11], [50, 24]], "of an even length of at least 10, but length_schedule has 11; set 10 instead"),
    ],
)
def test_schedules_that_do_not_grow_are_refused(section: str, value: Any, message: str) -> None:
    packing = "two-part" if section == "two-part" else "segments"
    make: Any = partial(TrainConfig, batch_schedule=value)
    if section != "batch":
        make = partial(DataConfig, length_schedule=value, packing=packing)
    with pytest.raises(ValueError, match=message):
        make()


def test_a_growing_batch_reads_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    run = scheduled(tmp_path, lengths=())
    constant = training_rows(SPLIT, SPECIAL, DataConfig(sequence_length=24), 0)
    read = torch.cat([part.tokens.input_ids for step in range(8) for part, _ in read_local_batch(run, step).micro_batches])
    assert len(read) == 3 * 4 + 5 * 8
    assert torch.equal(read, constant.batch(np.arange(52), np.arange(52)).input_ids)


@pytest.mark.parametrize("packing", ["segments", "packed"])
def test_after_a_change_of_length_every_row_is_read_once_per_epoch(packing: Any) -> None:
    data = DataConfig(sequence_length=24, length_schedule=LENGTHS, packing=packing)
    rows = scheduled_rows(SPLIT, SPECIAL, data, 0, step_sizes(TrainConfig(sequences_per_step=4), data).segments, in_slots=False)
    assert isinstance(rows, SuccessiveRows)
    short, long = rows.streams
    assert long.num_rows < short.num_rows
    # 4 steps of 96 tokens: 32 short rows. The long ones begin at that fraction of the epoch.
    begin = -(-32 * long.num_rows // short.num_rows)
    first = rows.batch(np.arange(32, 40), np.arange(8))
    assert torch.equal(first.input_ids, long.batch(np.arange(begin, begin + 8), np.arange(8)).input_ids)
    assert rows.batch(np.arange(24, 32), np.arange(8)).input_ids.shape == (8, 12)
    left = long.num_rows - begin
    epoch = rows.batch(np.arange(32 + left, 32 + left + long.num_rows), np.zeros(long.num_rows, np.int64))
    assert Counter(epoch.example_index.tolist()) == Counter(range(long.num_rows, 2 * long.num_rows))
    assert rows.epochs(32) == pytest.approx(32 / short.num_rows)
    assert rows.epochs(32 + 5 * long.num_rows) == pytest.approx(32 / short.num_rows + 5)


@pytest.mark.parametrize("name", [*objectives.names(), "rtd on modernbert"])
def test_every_objective_resumes_bit_for_bit_across_the_changes(tmp_path: Path, name: str) -> None:
    name, _, encoder = name.partition(" on ")
    model = {"encoder": encoder, "local_window": 8} if encoder else {}
    options: dict[str, Any] = {"model": model, "max_steps": 6}
    whole = scheduled(tmp_path, name, checkpoint_every_steps=1, keep_checkpoints=9, **options)
    train(whole, State())
    expected = checkpoint.load(tmp_path / "checkpoints" / "step-00000006")
    for cut in (3, 4):  # at both changes
        contents = checkpoint.load(tmp_path / "checkpoints" / f"step-{cut:08}")
        again = scheduled(tmp_path / str(cut), name, **options)
        checkpoint.load_model_tensors(again.objective, contents.model, "here")
        again.objective.load_carry_state(contents.carry)
        train(again, State.from_checkpoint(contents))
        got = checkpoint.load(tmp_path / str(cut) / "checkpoints" / "step-00000006")
        assert got.state["tokens"] == expected.state["tokens"]
        for part in ("model", "optimizer", "carry"):
            left, right = getattr(expected, part), getattr(got, part)
            assert left.keys() == right.keys()
            assert all(torch.equal(left[key], right[key]) for key in left), (part, cut)


def test_accumulation_does_not_change_the_result(tmp_path: Path) -> None:
    ends = []
    for micro in (None, 2):
        plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        run = scheduled(tmp_path / str(micro), model=plain, micro_batch_size=micro, log_every_steps=1)
        counts = [len(read_local_batch(run, step).micro_batches) for step in (0, 3, 4)]
        assert counts == ([1, 1, 1] if micro is None else [2, 4, 4]), "two rows of 24 are four of 12"
        train(run, State())
        ends.append((checkpoint.load(tmp_path / str(micro) / "checkpoints" / "step-00000008").model, read_metrics(run.folder)))
    assert ends[0][1][0]["loss"] == pytest.approx(ends[1][1][0]["loss"], rel=1e-6)
    for key, tensor in ends[0][0].items():
        torch.testing.assert_close(tensor, ends[1][0][key], rtol=0, atol=1e-5)


def test_a_memory_is_dropped_where_the_slots_change(tmp_path: Path) -> None:
    run = scheduled(tmp_path, "permutation-lm", lengths=(), checkpoint_every_steps=1, keep_checkpoints=9)
    train(run, State())
    found = [checkpoint.load(tmp_path / "checkpoints" / f"step-{step:08}").carry for step in (3, 4)]
    assert [len(carry) for carry in found] == [4, 8]
    memory = found[1]["memory.7"] if "memory.7" in found[1] else next(iter(found[1].values()))
    assert memory.any()


def test_flops_of_schedules_are_those_of_their_steps() -> None:
    sizes = StepSizes((ScheduleSegment(0, 8, 12), ScheduleSegment(3, 16, 12, 24, 288), ScheduleSegment(4, 8, 24, 40, 480)))
    factory = objectives.load("rtd")
    config = factory.Config(algorithm="two-stage", two_stage_steps=3.0, generator_size=1.0, tying="none")
    with torch.device("meta"):
        objective = factory(config, settings())
    first, second = objective.phases(8)
    flops = run_flops(objective, 8, sizes)
    by_hand = (
        3 * step_flops(objective, first, 12, 8).executed
        + step_flops(objective, second, 12, 16).executed
        + 4 * step_flops(objective, second, 24, 8).executed
    )
    assert flops.total.executed == pytest.approx(by_hand)
    assert flops.after(4).executed == pytest.approx(by_hand - 4 * step_flops(objective, second, 24, 8).executed)
    assert run_flops(objective, 8, StepSizes.constant(8, 24)).segments[0][0] == 3


def test_flops_follow_a_mask_rate_that_changes_while_the_batch_grows() -> None:
    factory = objectives.load("mlm")
    with torch.device("meta"):
        rates = {"mask_probability": 0.4, "mask_probability_end": 0.1, "mask_probability_steps": 8}
        objective = factory(factory.Config(**rates), settings())
    sizes = StepSizes((ScheduleSegment(0, 8, 12), ScheduleSegment(4, 32, 12, 32, 384)))
    (phase,) = objective.phases(8)
    steps = [step_flops(objective, replace(phase, begins=step, steps=1), 12, sizes.at(step).rows) for step in range(8)]
    whole = run_flops(objective, 8, sizes)
    assert whole.total.executed == pytest.approx(sum(each.executed for each in steps))
    assert whole.segments[1][1].executed < 4 * whole.segments[0][1].executed, "fewer tokens are predicted later"


def resolved(base: str, *overrides: str) -> Resolved[PretrainConfig]:
    """A configuration whose preset has these lines, as a preset would; the user's values are `overrides`."""
    origin = Origin("preset", "preset test")
    suggested = {key: Setting(setting.value, origin) for key, setting in parse_overrides(base.split(";")).items()}
    return resolve_pretrain_config(collect("tiny", None, ()) | suggested | parse_overrides(overrides))


SIZES = "train.max_steps=1000;data.sequence_length=64;train.sequences_per_step=4;"
PRESET, LONGER = SIZES + "train.batch_schedule=[[0,512],[0.5,1024]]", SIZES + "data.length_schedule=[[0,32],[0.5,64]]"


def test_the_number_of_sequences_is_that_of_the_last_segment(tmp_path: Path) -> None:
    preset = resolved(PRESET)
    assert preset.config.train.sequences_per_step == 16
    assert preset.origins["train.sequences_per_step"] == "preset test, the last of train.batch_schedule"
    own = resolved("train.max_steps=1000", "train.batch_schedule=[[0,512],[0.5,1024]]", "data.sequence_length=32")
    assert own.config.train.sequences_per_step == 32
    # What discern wrote can be given again, with both.
    (tmp_path / "config.toml").write_text(to_toml(own.config))
    assert load_pretrain_config(tmp_path / "config.toml", None).config == own.config


def test_a_size_that_the_user_sets_turns_the_schedule_of_a_preset_off() -> None:
    batch = resolved(PRESET, "train.sequences_per_step=8")
    assert (batch.config.train.sequences_per_step, batch.config.train.batch_schedule) == (8, ())
    assert batch.origins["train.batch_schedule"].endswith("off because of train.sequences_per_step")
    shorter = resolved(LONGER, "data.sequence_length=48")
    assert (shorter.config.data.sequence_length, shorter.config.data.length_schedule) == (48, ())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.sequences_per_step=8", "train.batch_schedule=[[0,512],[500,1024]]"],
            "train.batch_schedule ends with 16, but train.sequences_per_step is 8; expected the same",
        ),
        (
            ["data.sequence_length=32", "data.length_schedule=[[0,32],[500,64]]"],
            "ends with 64, but data.sequence_length is 32; expected the same",
        ),
        (["model.max_positions=64", "data.length_schedule=[[0,32],[500,128]]"], "128, beyond model.max_positions, which is 64"),
        (["train.batch_schedule=[[0,32],[10,1024]]"], "an update of 32 tokens cannot hold a row of 64"),
        (["train.batch_schedule=[[0,32],[10,63]]"], "an update of 32 tokens cannot hold a row of 64"),
        (
            ["train.max_hours=1", "train.batch_schedule=[[0,512],[0.5,1024]]"],
            "has a fraction of the run, and the number",
        ),
        (["train.batch_schedule=[[0,512],[0.5,1024],[300,2048]]"], "each must begin after the one before"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved("data.sequence_length=64;train.max_steps=1000", *overrides)


# A fraction of the run, the step that it is in 1,000 steps, and a step beyond a run of 100.
POINTS: dict[str, tuple[str, Any, str]] = {
    "optimizer.warmup_steps": ("0.1", 100, "400"),
    "train.batch_schedule": ("[[0, 512], [0.5, 1024]]", ((0, 512), (500, 1024)), "[[0, 512], [400, 1024]]"),
    "data.length_schedule": ("[[0, 16], [0.5, 32]]", ((0, 16), (500, 32)), "[[0, 16], [400, 32]]"),
    "objective.generator_weight_schedule": ("[[0, 0.0], [0.2, 1.0]]", ((0, 0.0), (200, 1.0)), "[[0, 0.0], [400, 1.0]]"),
    "objective.discriminator_weight_schedule": ("[[0, 0.0], [0.2, 1.0]]", ((0, 0.0), (200, 1.0)), "[[0, 0.0], [400, 1.0]]"),
    "objective.freeze_generator_at": ("0.5", 500, "100"),
    "objective.freeze_discriminator_at": ("0.5", 500, "100"),
    "objective.generator_warmup_steps": ("0.0001", 1, "100"),
    "objective.temperature_steps": ("0.4", 400, "101"),
    "objective.mask_probability_steps": ("0.4", 400, "101"),
}


@pytest.mark.parametrize("key", POINTS)
def test_a_point_in_a_run_is_a_fraction_or_a_step_within_it(key: str) -> None:
    fraction, step, beyond = POINTS[key]
    base = "objective.tying=none;objective.temperature_end=0.5;objective.mask_probability_end=0.3;optimizer.warmup_steps=0"
    base += ";objective.temperature_steps=1;objective.mask_probability_steps=1;train.max_steps=1000"
    section, name = key.split(".")
    run = resolved(base, f"{key}={fraction}")
    assert getattr(getattr(run.config, section), name) == step
    assert run.origins[key].endswith("of train.max_steps")
    with pytest.raises(ConfigError, match=rf"--set: {key} names step \d+, which is not within the 100 steps") as caught:
        resolved(base, "train.max_steps=100", f"{key}={beyond}")
    assert "fractions of the run below 1, or --set train.max_steps=" in str(caught.value.hint)


def test_a_run_that_is_resumed_keeps_the_steps_of_its_fractions() -> None:
    before = resolved(PRESET).config
    preset = {
        key: Setting(setting.value, Origin("preset", "test")) for key, setting in parse_overrides(PRESET.split(";")).items()
    }
    longer = collect("tiny", None, ()) | preset | parse_overrides(["train.max_steps=9000"])
    config = resolve_pretrain_config(longer, earlier=before).config
    assert (config.train.max_steps, config.optimizer.warmup_steps) == (9000, before.optimizer.warmup_steps)
    assert step_sizes(config.train, config.data) == step_sizes(before.train, before.data)


def test_a_weight_that_is_constant_names_no_step() -> None:
    assert resolved("train.max_steps=10", "objective.generator_weight_schedule=[[400, 0.5]]")
