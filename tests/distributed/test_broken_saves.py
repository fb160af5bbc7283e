"""Checkpoints of divided weights that are not completed: the newest whole one is used, and nothing incomplete is read."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from discern.training import checkpoint

PROGRAM = """
import os
import signal
import sys
import time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from tests.training.test_loop import build, context
from discern.errors import CheckpointError
from discern.training.context import State
from discern.training.loop import train
from discern.training.parallel import join_ranks

folder, case = Path(sys.argv[1]), sys.argv[2]
write, saves = HuggingFaceStorageWriter.write_data, []


def broken(self, plan, planner):
    saves.append(plan)
    if len(saves) == 2 and os.environ["RANK"] == "1":
        if case == "full":
            raise OSError(28, "No space left on device")
        done = write(self, plan, planner)  # the file is there, and the checkpoint not yet published
        os.kill(os.getpid(), signal.SIGKILL)
        return done
    return write(self, plan, planner)


HuggingFaceStorageWriter.write_data = broken
with join_ranks("cpu") as ranks:
    run = context(folder, build(0.0), parallel="fsdp", max_steps=40, checkpoint_every_steps=3, sequences_per_step=4)
    object.__setattr__(run, "ranks", ranks)
    try:
        train(run, State())
    except CheckpointError as error:
        assert "No space left on device" in error.message and "step-00000003" in error.hint, (error.message, error.hint)
        sys.exit(28)
"""


def launch(folder: Path, case: str) -> int:
    """Run two processes and return the exit code of the first."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).parents[2])))
    run = folder / "run"
    run.mkdir()
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "DISCERN_RANKS_TIMEOUT": "20"}
    line = [sys.executable, str(program), str(run), case]
    ranks = [
        subprocess.Popen(line, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
    ]
    codes = [rank.wait(120) for rank in ranks]
    assert codes[1] == (28 if case == "full" else -signal.SIGKILL)
    return codes[0]


@pytest.mark.parametrize("case", [pytest.param("full", marks=pytest.mark.slow), "killed"])
def test_a_save_that_one_process_cannot_complete_leaves_the_one_before(tmp_path: Path, case: str) -> None:
    code = launch(tmp_path, case)
    assert code == 28 if case == "full" else code != 0
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoint.found(folder)] == ["step-00000003"]
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert left == ([] if case == "full" else [".step-00000006.partial"])
    contents = checkpoint.load_newest(folder, pytest.fail)
    assert contents is not None
    assert contents.step == 3
    checkpoint.clean(folder)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
