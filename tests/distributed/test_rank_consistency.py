"""Ranks that are about to do different things, or write to different places, are told so before anything is written."""

from pathlib import Path
from typing import Any

import pytest
import torch

from discern.errors import ConfigError
from discern.training.config import TrainConfig
from discern.training.distributed import Ranks, check_ranks
from discern.training.replica import num_shards
from tests.distributed.test_two_ranks import run_ranks

PROGRAM = """
import os
import sys
import time
from pathlib import Path
sys.path.insert(0, {root!r})
from discern.errors import ConfigError, DataError
from discern.training import distributed
from discern.training.config import TrainConfig
from discern.training.distributed import check_consistency, check_ranks, join_ranks

out = Path(sys.argv[1]) / "not" / "there"


def refused(kind, action):
    try:
        action()
    except kind as error:
        return error.message + (error.hint or "")
    raise AssertionError("nothing was refused")


with join_ranks("cpu") as ranks:
    check = lambda config=TrainConfig(), tokenizer="a": check_ranks(ranks, out, config, tokenizer=tokenizer)
    check()
    said = refused(ConfigError, lambda: check(tokenizer="b" if ranks.rank == 2 else "a"))
    assert said.startswith("process 2 on ") and "tokenizer: a in process 0, b in process 2" in said, said
    said = refused(ConfigError, lambda: check(TrainConfig(max_steps=7 if ranks.rank == 1 else 8)))
    assert said.startswith("process 1 on ") and "max_steps: 8 in process 0, 7 in process 1" in said, said
    said = refused(DataError, lambda: check_consistency(ranks, dict(step=str(ranks.rank)), hint="try again", error=DataError))
    assert said.startswith("process 1 on ") and said.endswith("step: 0 in process 0, 1 in process 1try again"), said

    now = time.time
    for rank, difference, way in ((1, -40, "behind"), (2, 40, "ahead of")):
        time.time = lambda: now() + difference * (ranks.rank == rank)
        said = refused(ConfigError, check)
        assert said.startswith(f"the clock of process {{rank}} on ") and f"{{way}} that of process 0 on " in said, said
        assert said.endswith("by more than 15 seconds"), said
    time.time = lambda: now() + 5 * ranks.rank
    check()

    # As if the folder of rank 1 were another one under the same name.
    distributed._PATIENCE = 0.2
    if ranks.rank == 1:
        os.listdir = lambda _: []
    said = refused(ConfigError, check)
    assert said.startswith("process 1 on "), said
    assert f"sees what process 0 writes to {{out.parents[1]}}: yes in process 0, no in process 1" in said, said

    def full(self, **options):
        raise OSError(28, "No space left on device")

    if ranks.writes:
        Path.touch = full
    said = refused(DataError, check)
    assert "No space left on device" in said, said
"""


def test_ranks_that_differ_are_named_on_every_rank(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).parents[2])))
    where = tmp_path / "out"
    where.mkdir()
    run_ranks(3, program, str(where))
    assert list(where.iterdir()) == []


def test_one_process_agrees_with_itself(tmp_path: Path) -> None:
    check_ranks(Ranks(0, 1, torch.device("cpu")), tmp_path / "out", TrainConfig())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("size", "world"), [(4, 6), (6, 6), (2, 5), (2, 2)])
def test_groups_of_hsdp_that_are_unequal_or_only_one_are_refused(size: int, world: int) -> None:
    with pytest.raises(ConfigError, match=f"two equal groups of .* found {world} processes, in groups of {size}") as caught:
        num_shards(TrainConfig(parallel="hsdp", shard_ranks=size), world)
    assert "train.shard_ranks" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("parallel", "size", "world", "shards"), [("hsdp", 2, 6, 2), ("fsdp", None, 5, 5), ("hsdp", 4, 1, 1), ("ddp", None, 4, 1)]
)
def test_the_ranks_that_share_the_weights(parallel: Any, size: int | None, world: int, shards: int) -> None:
    assert num_shards(TrainConfig(parallel=parallel, shard_ranks=size), world) == shards
