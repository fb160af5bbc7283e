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
from discern.training.schedule import StepSizes, Stretch, step_sizes
from discern.training.state import State, TrainContext
from tests.support import MODELS, SPECIAL, settings
from tests.training.test_loop import SPLIT, context

BATCH = ((0, 96), (250, 192))  # 4 rows of 24 in steps 0 to 2, then 8
LENGTHS = ((0, 12), (300, 24))
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
    source = scheduled_rows(SPLIT, SPECIAL, data, 0, sizes.row_stretches, in_slots=in_slots)
    for key, value in {"sizes": sizes, "source": source}.items():
        object.__setattr__(run, key, value)
    return run


def test_the_sizes_by_hand() -> None:
    data = DataConfig(sequence_length=24, length_schedule=LENGTHS)
    sizes = step_sizes(TrainConfig(batch_schedule=BATCH, sequences_per_step=8), data)
    # 96 tokens a step: 8 rows of 12. Before step 3, 288 tokens are read, so the batch grows; before step 4, 480: the rows do.
    assert sizes.stretches == (Stretch(0, 8, 12), Stretch(3, 16, 12, 24, 288), Stretch(4, 8, 24, 40, 480))
    assert [sizes.at(step).rows for step in range(6)] == [8, 8, 8, 16, 8, 8]
    assert [sizes.examples_before(step) for step in range(7)] == [0, 8, 16, 24, 40, 48, 56]
    assert [sizes.positions_before(step) for step in (0, 3, 4, 6)] == [0, 288, 480, 864]
    assert [step for step in range(10) if sizes.changes_at(step)] == [3, 4]


def test_a_length_schedule_keeps_the_tokens_of_an_update() -> None:
    data = DataConfig(sequence_length=64, length_schedule=((0, 16), (2000, 32), (2001, 64)))
    sizes = step_sizes(TrainConfig(sequences_per_step=4), data)
    # 256 tokens a step; the stage of 32 would begin and end within step 8, and is skipped.
    assert sizes.stretches == (Stretch(0, 16, 16), Stretch(8, 4, 64, 128, 2048))
    assert step_sizes(TrainConfig(sequences_per_step=4), DataConfig()) == StepSizes.constant(4, 128)


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("batch", [[10, 96]], "begins at token 10; expected 0 in its first stage"),
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
    rows = scheduled_rows(
        SPLIT, SPECIAL, data, 0, step_sizes(TrainConfig(sequences_per_step=4), data).row_stretches, in_slots=False
    )
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
    sizes = StepSizes((Stretch(0, 8, 12), Stretch(3, 16, 12, 24, 288), Stretch(4, 8, 24, 40, 480)))
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
    assert run_flops(objective, 8, StepSizes.constant(8, 24)).stretches[0][0] == 3


def test_flops_follow_a_mask_rate_that_changes_while_the_batch_grows() -> None:
    factory = objectives.load("mlm")
    with torch.device("meta"):
        rates = {"mask_probability": 0.4, "mask_probability_end": 0.1, "mask_probability_steps": 8}
        objective = factory(factory.Config(**rates), settings())
    sizes = StepSizes((Stretch(0, 8, 12), Stretch(4, 32, 12, 32, 384)))
    (phase,) = objective.phases(8)
    steps = [step_flops(objective, replace(phase, begins=step, steps=1), 12, sizes.at(step).rows) for step in range(8)]
    whole = run_flops(objective, 8, sizes)
    assert whole.total.executed == pytest.approx(sum(each.executed for each in steps))
    assert whole.stretches[1][1].executed < 4 * whole.stretches[0][1].executed, "fewer tokens are predicted later"


def resolved(base: str, *overrides: str) -> Resolved[PretrainConfig]:
    """A configuration whose preset has these lines, as a preset would; the user's values are `overrides`."""
    origin = Origin("preset", "preset test")
    suggested = {key: Setting(setting.value, origin) for key, setting in parse_overrides(base.split(";")).items()}
    return resolve_pretrain_config(collect("tiny", None, ()) | suggested | parse_overrides(overrides))


PRESET = "train.max_steps=1000;data.sequence_length=64;train.sequences_per_step=4;train.batch_schedule=[[0,512],[64000,1024]]"
LONGER = "train.max_steps=1000;data.sequence_length=64;train.sequences_per_step=4;data.length_schedule=[[0,32],[64000,64]]"


def test_the_number_of_sequences_is_that_of_the_last_stage(tmp_path: Path) -> None:
    found = resolved(PRESET)
    assert found.config.train.sequences_per_step == 16
    assert found.origins["train.sequences_per_step"] == "preset test, fitted from 4 to train.batch_schedule"
    own = resolved("train.max_steps=1000", "train.batch_schedule=[[0,512],[64000,1024]]", "data.sequence_length=32")
    assert own.config.train.sequences_per_step == 32
    # What discern wrote can be given again, with both.
    (tmp_path / "config.toml").write_text(to_toml(own.config))
    assert load_pretrain_config(tmp_path / "config.toml", None).config == own.config


def test_a_size_that_the_user_sets_turns_the_schedule_of_a_preset_off(tmp_path: Path) -> None:
    found = resolved(PRESET, "train.sequences_per_step=8")
    assert (found.config.train.sequences_per_step, found.config.train.batch_schedule) == (8, ())
    assert found.origins["train.batch_schedule"].endswith("to train.sequences_per_step")
    shorter = resolved(LONGER, "data.sequence_length=48")
    assert (shorter.config.data.sequence_length, shorter.config.data.length_schedule) == (48, ())


def test_both_set_by_the_user_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="different sizes of an update: 1,024 tokens, which are 16 rows of 64, and 8 rows"):
        resolved(
            "data.sequence_length=64;train.max_steps=1000",
            "train.sequences_per_step=8",
            "train.batch_schedule=[[0,512],[64000,1024]]",
        )
    with pytest.raises(ConfigError, match=r"ends with rows of 64, but data.sequence_length is 32; expected the same"):
        resolved("train.max_steps=1000", "data.sequence_length=32", "data.length_schedule=[[0,32],[64000,64]]")
    with pytest.raises(ConfigError, match=r"beyond model.max_positions"):
        resolved("model.max_positions=64;train.max_steps=100000", "data.length_schedule=[[0,32],[64000,128]]")


@pytest.mark.parametrize("base", [PRESET, LONGER])
def test_a_schedule_beyond_the_run_is_refused_or_shortened(tmp_path: Path, base: str) -> None:
    key = "train.batch_schedule" if base is PRESET else "data.length_schedule"
    kept = resolved(base)
    assert not kept.origins[key].count("fitted")
    found = resolved(base, "train.max_steps=20")
    assert "fitted" in found.origins[key]
    sizes = step_sizes(found.config.train, found.config.data)
    total = sizes.positions_before(20)
    assert len(sizes.stretches) == 2
    assert 0.4 * total < sizes.stretches[1].positions < 0.6 * total, "the last stage begins after half of the run"
    own = base.split(";")[-1]
    rest = base.removesuffix(";" + own).replace("train.sequences_per_step=4", "train.sequences_per_step=16")
    with pytest.raises(ConfigError, match=r"begins at token 64,000, but the 20 steps of train.max_steps read only"):
        resolved(rest, own, "train.max_steps=20")
    assert getattr(resolved(rest, own, "train.max_hours=1", "train.max_steps=20").config, key.split(".")[0])


def test_a_row_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an update of 32 tokens cannot hold a row of 64"):
        resolved("data.sequence_length=64;train.max_steps=1000", "train.batch_schedule=[[0,32],[640,1024]]")
    with pytest.raises(ConfigError, match=r"fewer than a row of data.sequence_length 64"):
        resolved("data.sequence_length=64;train.max_steps=1000", "train.batch_schedule=[[0,32],[640,63]]")


def test_changes_of_rates_end_within_the_run(tmp_path: Path) -> None:
    ramps = "objective.temperature_end=0.5;objective.temperature_steps=400;objective.mask_probability_end=0.3"
    base = f"train.max_steps=1000;{ramps};objective.mask_probability_steps=300"
    found = resolved(base, "train.max_steps=100").config.objective
    assert (found.temperature_steps, found.mask_probability_steps) == (100, 100)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"objective.temperature_steps: 400 is more than the 100 steps of train.max_steps"):
        resolved(base, "train.max_steps=100", "objective.temperature_steps=400")


# What the user gives, what a run of 100 steps makes of it, and what is typed to keep it.
IN_STEPS = {
    "objective.generator_weight_schedule": (
        "[[0, 0.0], [200, 0.5], [400, 1.0]]",
        ((0, 0.0), (50, 0.5), (100, 1.0)),
        "'objective.generator_weight_schedule=[[0, 0.0], [50, 0.5], [100, 1.0]]', or --set train.max_steps=400",
    ),
    "objective.discriminator_weight_schedule": (
        "[[398, 1.0], [399, 0.5], [400, 0.0]]",
        ((98, 1.0), (99, 0.5), (100, 0.0)),
        "'objective.discriminator_weight_schedule=[[98, 1.0], [99, 0.5], [100, 0.0]]', or --set train.max_steps=400",
    ),
    "objective.freeze_generator_at": ("100", 50, "objective.freeze_generator_at=50, or --set train.max_steps=200"),
    "objective.freeze_discriminator_at": ("100", 50, "objective.freeze_discriminator_at=50, or --set train.max_steps=200"),
    "objective.generator_warmup_steps": ("400", 10, "objective.generator_warmup_steps=10, or --set train.max_steps=4000"),
    "optimizer.warmup_steps": ("400", 10, "optimizer.warmup_steps=10, or --set train.max_steps=4000"),
}


@pytest.mark.parametrize("key", IN_STEPS)
def test_steps_beyond_the_run_are_refused_or_fitted(key: str) -> None:
    value, fitted, hint = IN_STEPS[key]
    base = f"train.max_steps=1000;objective.tying=none;{key}={value}"
    section, name = key.split(".")
    whole = resolved(base)
    assert "fitted" not in whole.origins[key]
    found = resolved(base, "train.max_steps=100")
    assert getattr(getattr(found.config, section), name) == fitted
    assert found.origins[key].endswith("to train.max_steps")
    with pytest.raises(
        ConfigError, match=rf"--set: {key}: \d+ is (more|not less) than the 100 steps of train.max_steps, so "
    ) as caught:
        resolved(base, "train.max_steps=100", f"{key}={value}")
    assert caught.value.hint == f"--set {hint}"


def test_a_weight_that_is_constant_names_no_step() -> None:
    assert resolved("train.max_steps=10", "objective.generator_weight_schedule=[[400, 0.5]]")
