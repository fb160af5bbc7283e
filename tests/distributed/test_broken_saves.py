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
import resource
import signal
import sys
import time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from tests.training.test_loop import build, context
from discern.errors import CheckpointError, DataError, RanksError
from discern.training import checkpoint, evaluation
from discern.training.state import State
from discern.training.loop import train
from discern.training.distributed import join_ranks

folder, case, rank = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
write, save, saves = HuggingFaceStorageWriter.write_data, checkpoint.save, []


def fill_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def broken(self, plan, planner):
    saves.append(plan)
    if case == "evaluation":
        time.sleep(1)  # the evaluation fails before the checkpoint is complete
    if case != "evaluation" and len(saves) == 2 and rank == "1":
        if case == "full":
            fill_disk()
            return write(self, plan, planner)
        done = write(self, plan, planner)  # the file is there, and the checkpoint not yet published
        os.kill(os.getpid(), signal.SIGKILL)
        return done
    return write(self, plan, planner)


def limited(*arguments):
    saves.append(arguments)
    if len(saves) == 2:
        fill_disk()
    save(*arguments)


def unreadable(*_, **__):
    raise OSError(5, "Input/output error")


HuggingFaceStorageWriter.write_data = broken
if case == "evaluation":
    evaluation.evaluate = unreadable
checkpoint.save = limited
parallel = "ddp" if case == "full on the first" else "fsdp"
try:
    with join_ranks("cpu") as ranks:
        options = dict(max_steps=40, checkpoint_every_steps=3, log_every_steps=40, sequences_per_step=4)
        options |= dict(evaluate_every_steps=3) if case == "evaluation" else {{}}
        run = context(folder if ranks.writes else folder / "other", build(0.0), parallel=parallel, **options)
        object.__setattr__(run, "ranks", ranks)
        train(run, State())
except CheckpointError as error:
    assert "File too large" in error.message and "step-00000003" in error.hint, (error.message, error.hint)
    assert parallel == "ddp" or "process 1 on " in error.message, error.message
    sys.exit(28)
except DataError as error:
    assert case == "evaluation" and "continues from step 3, which is saved" in error.hint, (error.message, error.hint)
    sys.exit(30)
except RanksError as error:
    assert case != "full on the first" or "rank 0 (pid " in error.message and "File too large" in error.message, error.message
    sys.exit(29)
"""


def launch(folder: Path, case: str) -> None:
    """Run two processes until both have ended."""
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
    assert codes == CASES[case]


CASES = {"full": [28, 28], "full on the first": [28, 29], "killed": [29, -signal.SIGKILL], "evaluation": [30, 30]}
"""Exit codes of both processes, by what happens to a save of the second one, or of the first one under DDP."""


@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.slow) for case in ("full", "full on the first")), "killed", "evaluation"]
)
def test_a_save_that_one_process_cannot_complete_leaves_the_one_before(tmp_path: Path, case: str) -> None:
    launch(tmp_path, case)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoint.found(folder)] == ["step-00000003"]
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert left == ([".step-00000006.partial"] if case == "killed" else [])
    contents = checkpoint.load_newest(folder, pytest.fail)
    assert contents is not None
    assert contents.step == 3
    checkpoint.clean(folder)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
