"""A run that goes on with another number of processes: the same rows, masks and weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from discern.errors import CheckpointError
from discern.training import checkpoint
from tests.distributed.test_two_ranks import run_ranks

PROGRAM = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from tests.training.test_loop import context
from tests.support import settings
from discern.objectives import objectives
from discern.training import checkpoint
from discern.training.state import State
from discern.training.loop import train
from discern.training.distributed import join_ranks

folder, parallel, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with join_ranks("cpu") as ranks:
    factory = objectives.load("rtd")
    objective = factory(factory.Config(), settings(hidden_dropout=0.0, attention_dropout=0.0))
    objective.initialize(0)
    rule = dict(name="muon", schedule="constant", warmup_steps=0)
    options = dict(sequences_per_step=12, weight_average=0.9, log_every_steps=1, checkpoint_every_steps=2, keep_checkpoints=9)
    run = context(folder, objective, parallel=parallel, max_steps=last, optimizer=rule, **options)
    object.__setattr__(run, "ranks", ranks)
    found = checkpoint.load_newest(folder / "checkpoints", print)
    state = State() if found is None else State.from_checkpoint(found)
    if found is not None:
        checkpoint.load_model_tensors(objective, found.model, "the checkpoint")
    train(run, state)
    assert state.step == last
"""
LEGS = [(1, "ddp", 3), (2, "fsdp", 6), (3, "fsdp", 8), (1, "ddp", 10)]
"""Number of processes, how they share the work, and the step at which they stop."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of ten steps: of one process, and of one, two, three and one."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("whole", "chain")}
    program = made["whole"] / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).parents[2])))
    run_ranks(1, program, str(made["whole"]), "ddp", "10")
    for processes, parallel, last in LEGS:
        run_ranks(processes, program, str(made["chain"]), parallel, str(last))
    return {name: folder / "checkpoints" for name, folder in made.items()}


def test_the_weights_are_those_of_one_process_throughout(folders: dict[str, Path]) -> None:
    one, chain = (checkpoint.load(folders[name] / "step-00000010") for name in ("whole", "chain"))
    for first, second in ((one.model, chain.model), (one.average, chain.average), (one.optimizer, chain.optimizer)):
        assert first.keys() == second.keys()
        for key, tensor in first.items():
            torch.testing.assert_close(tensor, second[key], rtol=0, atol=1e-5)
    assert one.state["tokens"] == chain.state["tokens"]


def test_every_process_writes_its_part(folders: dict[str, Path]) -> None:
    # 'keep_checkpoints' of the legs keeps all of them.
    written = {step: sorted(path.name for path in (folders["chain"] / f"step-{step:08d}").iterdir()) for step in (2, 6, 8, 10)}
    assert written[2] == written[10] == [
        "average.safetensors", "checksums.json", "model.safetensors", "optimizer.safetensors", "state.json"
    ]  # fmt: skip
    for step, processes in ((6, 2), (8, 3)):
        parts = [f"shard-{number:05d}-model-00001-of-00001.safetensors" for number in range(1, processes + 1)]
        assert written[step] == ["checksums.json", *parts, "state.json"]
    own = load_file(folders["chain"] / "step-00000006" / parts[0])
    whole = checkpoint.load(folders["chain"] / "step-00000006")
    divided = [name for name, tensor in whole.model.items() if tensor.ndim > 1]
    assert divided
    assert all(len(own[f"model/{name}"]) == -(-len(whole.model[name]) // 2) for name in divided)
    moments = {name: tensor for name, tensor in whole.optimizer.items() if tensor.ndim > 1}
    assert any(name.endswith(".momentum") for name in moments)
    assert all(len(own[f"optimizer/{name}"]) == -(-len(tensor) // 2) for name, tensor in moments.items())


def test_a_missing_or_damaged_part_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    copied = tmp_path / "step-00000008"
    copied.mkdir()
    for path in (folders["chain"] / copied.name).iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    part = copied / "shard-00002-model-00001-of-00001.safetensors"
    content = part.read_bytes()
    part.unlink()
    with pytest.raises(CheckpointError, match=part.name):
        checkpoint.load(copied)
    part.write_bytes(content[:-8] + bytes(8))
    with pytest.raises(CheckpointError, match=f"{part.name} is damaged"):
        checkpoint.load(copied)
