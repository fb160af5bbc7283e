"""Compiled networks with divided weights on two processes: the weights of eager ones."""

from pathlib import Path

import pytest

from tests.distributed.test_two_ranks import run_ranks

PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from torch._dynamo.utils import counters
from discern import kernels
from discern.training.checkpoint import model_tensors
from discern.training.state import State
from discern.training.loop import train
from discern.training.distributed import join_ranks
from tests.training.test_loop import build, context

with join_ranks("cpu") as ranks, kernels.switched_off():  # which the compiler would not trace
    found = []
    for mode in ("off", *sys.argv[2:]):
        torch._dynamo.reset()
        counters.clear()
        folder = Path(sys.argv[1]) / f"{{mode}}-{{ranks.rank}}"
        run = context(folder, build(0.0), parallel="fsdp", max_steps=5, checkpoint_every_steps=100)
        run = replace(run, ranks=ranks, compilation=mode)
        train(run, State())
        found.append({{name: tensor.clone() for name, tensor in model_tensors(run.objective).items()}})
        assert (counters["stats"]["unique_graphs"] > 0) == (mode != "off"), mode
        for name, tensor in found[0].items():
            torch.testing.assert_close(found[-1][name], tensor, rtol=0, atol=1e-5)
"""


@pytest.mark.slow
def test_compiled_networks_have_the_weights_of_eager_ones(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).parents[2])))
    run_ranks(2, program, str(tmp_path), "networks", "blocks")
