"""Two processes against one: the same positions and uniforms, the same gradients, the same weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

PROGRAM = """
import os
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from tests.training.test_loop import build, parts, stream
from discern.objectives.mlm import MLMConfig, MaskedLanguageModel
from tests.support import settings
from discern.training.loop import State, train
from discern.training.parallel import join_ranks
from discern.training.journal import Journal

out, name, micro = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) or None
if name == "rtd":
    objective = build(0.0)
else:
    objective = MaskedLanguageModel(MLMConfig(), settings(hidden_dropout=0.0, attention_dropout=0.0))
    objective.initialise(0)
with join_ranks("cpu") as ranks:
    steps = dict(max_steps=10, log_every_steps=1, evaluate_every_steps=5)
    run = parts(out if ranks.writes else out / "other", objective, micro_batch_size=micro, **steps)
    object.__setattr__(run, "ranks", ranks)
    train(run, State())
# a thread of a group that lives on may abort the process at its end
threads = [Path("/proc/self/task", number, "comm").read_text().strip() for number in os.listdir("/proc/self/task")]
assert not [name for name in threads if "gloo" in name], threads
"""


def run_ranks(processes: int, program: Path, *arguments: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    line = [sys.executable, *launcher, str(program), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def launch(
    folder: Path, processes: int, objective: str, micro: int = 0
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    program = folder / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).parents[2])))
    out = folder / f"run{processes}-{micro}"
    out.mkdir()
    run_ranks(processes, program, str(out), objective, str(micro))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return load_file(out / "checkpoints" / "step-00000010" / "model.safetensors"), records


@pytest.mark.parametrize("objective", ["rtd", "mlm"])
def test_two_processes_equal_one(tmp_path: Path, objective: str) -> None:
    one, records_one = launch(tmp_path, 1, objective)
    two, records_two = launch(tmp_path, 2, objective, micro=2)
    assert records_one[0]["grad_norm"] == pytest.approx(records_two[0]["grad_norm"], rel=1e-5)
    assert records_one[0]["loss"] == pytest.approx(records_two[0]["loss"], rel=1e-6)
    assert [r["tokens"] for r in records_one] == [r["tokens"] for r in records_two]
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=1e-5)
    held = [key for key in records_one[-1] if "accuracy" in key or key.startswith("heldout")]
    assert held
    assert {key: records_two[-1][key] for key in held} == pytest.approx({key: records_one[-1][key] for key in held}, abs=2e-3)
