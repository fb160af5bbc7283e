"""Ranks that are about to do different things, or write to different places, are told so before anything is written."""

from pathlib import Path

import pytest
import torch

from discern.errors import ConfigError
from discern.training.config import TrainConfig
from discern.training.distributed import Ranks, check_agreement, check_shared, facts_of
from discern.training.replica import check_groups
from tests.distributed.test_two_ranks import run_ranks

PROGRAM = """
import os
import sys
import time
from pathlib import Path
sys.path.insert(0, {root!r})
from discern.errors import ConfigError, DataError
from discern.training import distributed as agreement
from discern.training.config import TrainConfig
from discern.training.distributed import join_ranks

out = Path(sys.argv[1]) / "not" / "there"


def refused(kind, action):
    try:
        action()
    except kind as error:
        return error.message + (error.hint or "")
    raise AssertionError("nothing was refused")


with join_ranks("cpu") as ranks:
    agreement.check_ranks(ranks, out, TrainConfig(), tokenizer="a")

    other = "b" if ranks.rank == 2 else "a"
    said = refused(ConfigError, lambda: agreement.check_ranks(ranks, out, TrainConfig(), tokenizer=other))
    assert said.startswith("process 2 on ") and "tokenizer: a in process 0, b in process 2" in said, said

    agreement.check_same_start(ranks, 8)
    agreement.check_same_start(ranks, None)
    said = refused(DataError, lambda: agreement.check_same_start(ranks, 1200 if ranks.rank else 1600))
    assert said.startswith("process 1 on ") and "found the checkpoint of step 1,200, but process 0" in said, said
    said = refused(DataError, lambda: agreement.check_same_start(ranks, None if ranks.rank == 2 else 1600))
    assert said.startswith("process 2 on ") and "found no checkpoint, but process 0" in said, said

    config = TrainConfig(max_steps=7 if ranks.rank == 1 else 8)
    said = refused(ConfigError, lambda: agreement.check_ranks(ranks, out, config, tokenizer="a"))
    assert said.startswith("process 1 on ") and "max_steps: 8 in process 0, 7 in process 1" in said, said

    for rank, difference, way in ((1, -40, "behind"), (2, 40, "ahead of")):
        clock = lambda: time.time() + difference * (ranks.rank == rank)
        said = refused(ConfigError, lambda: agreement.check_clocks(ranks, clock))
        assert said.startswith(f"the clock of process {{rank}} on ") and f"{{way}} that of process 0 on " in said, said
        assert said.endswith("by more than 15 seconds"), said
    agreement.check_clocks(ranks, lambda: time.time() + 5 * ranks.rank)

    # As if the folder of rank 1 were another one under the same name.
    agreement._PATIENCE = 0.2
    if ranks.rank == 1:
        agreement._is_listed = lambda mark: False
    said = refused(ConfigError, lambda: agreement.check_shared(ranks, out))
    assert said.startswith("process 1 on ") and "does not see what process 0" in said, said

    def full(self, **options):
        raise OSError(28, "No space left on device")

    if ranks.writes:
        Path.touch = full
    said = refused(DataError, lambda: agreement.check_shared(ranks, out))
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
    alone = Ranks(0, 1, torch.device("cpu"))
    check_agreement(alone, facts_of(TrainConfig()))
    check_shared(alone, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "world", "hint"),
    [(4, 6, "shard_ranks=3"), (6, 6, "shard_ranks=3"), (2, 5, "parallel=fsdp"), (2, 2, "parallel=fsdp")],
)
def test_groups_of_hsdp_that_are_unequal_or_only_one_are_refused(size: int, world: int, hint: str) -> None:
    ranks = Ranks(0, world, torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"two equal groups of .* found {world} processes, in groups of {size}") as caught:
        check_groups(TrainConfig(parallel="hsdp", shard_ranks=size), ranks)
    assert hint in (caught.value.hint or "")


def test_groups_that_divide_the_processes_are_accepted() -> None:
    check_groups(TrainConfig(parallel="hsdp", shard_ranks=2), Ranks(0, 6, torch.device("cpu")))
    check_groups(TrainConfig(parallel="fsdp"), Ranks(0, 5, torch.device("cpu")))
    check_groups(TrainConfig(parallel="hsdp", shard_ranks=4), Ranks(0, 1, torch.device("cpu")))
