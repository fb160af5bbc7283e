"""Groups of processes that train small runs one after another, as starting processes takes longer than training."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

from discern import kernels
from discern.objectives import objectives
from discern.training import checkpoint
from discern.training.distributed import join_ranks
from discern.training.loop import train
from discern.training.state import State, TrainContext
from tests.objectives.rtd_options import OPTIONS, build_option
from tests.processes import run_ranks
from tests.support import MODELS, settings
from tests.training import test_step_sizes
from tests.training.test_loop import OPTIMIZERS, context


class Leg(NamedTuple):
    """Part of a run that one group trains, up to a step.

    Attributes:
        run: an objective and a variant after a plus; an option of `rtd_options`; 'memory'.
        parallel: how the processes share the work.
        folder: where the run is, below the folder of all.
        compiled: whether the networks are compiled.
    """

    run: str
    parallel: str
    folder: str
    last: int = 4
    compiled: bool = False


OFTEN = {"log_every_steps": 1, "evaluate_every_steps": 2, "checkpoint_every_steps": 2, "keep_checkpoints": 9}


def build_run(name: str, folder: Path, **options: Any) -> TrainContext:
    kind, _, variant = name.partition("+")
    options |= OPTIMIZERS.get(variant, {})
    if name in OPTIONS:
        return context(folder, build_option(OPTIONS[name]), **options)
    model = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **MODELS.get(kind, {})}
    if kind == "memory":
        same = {"lengths": (), "batch_schedule": (), "config": {"memory_length": 20}, "model": model}
        return test_step_sizes.scheduled(folder, "permutation-lm", **same, **options)
    factory = objectives.load(kind)
    if variant == "growing":
        chosen = {"masking": "entropy"} if "masking" in factory.Config.model_fields else {}
        options |= {"batch_schedule": ((0, 96), (1, 192)), "lengths": ((0, 12), (2, 24))}
        return test_step_sizes.scheduled(folder, kind, config=chosen, model=model, **options)
    config = factory.Config()
    if variant in ("modernbert", "deberta"):
        settings_of = {"modernbert": {"local_window": 8}, "deberta": {"position_buckets": 8, "mask_decoder": True}}
        model |= {"encoder": variant, **settings_of[variant]}
        config = factory.Config(tying="gradient-disentangled")
    objective = factory(config, settings(**model))
    objective.initialize(0)
    if variant == "chain":
        options |= {"optimizer": {"name": "muon", "schedule": "constant", "warmup_steps": 0}, "weight_average": 0.9}
    return context(folder, objective, **options)


def train_legs(out: Path, legs: Sequence[Leg]) -> None:
    """Train each leg on all processes of this group, from the newest checkpoint in its folder."""
    graphs = counters["stats"]
    with join_ranks("cpu") as ranks:
        for name, parallel, folder, last, compiled in legs:
            options = {"max_steps": last, "parallel": parallel, "micro_batch_size": None if ranks.world_size == 1 else 2}
            run = build_run(name, out / folder if ranks.writes else out / "other" / folder, **(OFTEN | options))
            run = replace(run, ranks=ranks, compiled=compiled)
            contents = checkpoint.load_newest(out / folder / "checkpoints", print)
            state = State() if contents is None else State.from_checkpoint(contents)
            if contents is not None:
                checkpoint.load_model_tensors(run.objective, contents.model, "the checkpoint")
                run.objective.load_carry_state(contents.carry)
            ranks.barrier()
            graphs.clear()
            # The compiler would not trace the kernels.
            with kernels.switched_off() if compiled else nullcontext():
                train(run, state)
            assert state.step == last
            assert (graphs["unique_graphs"] > 0) == compiled
            if parallel == "ddp":
                weights = [tensor.tolist() for tensor in checkpoint.model_tensors(run.objective).values()]
                assert all(other == weights for other in ranks.gather(weights)), f"the processes differ: {name}"


def run_group(processes: int, out: Path, legs: Sequence[Leg]) -> None:
    if processes == 1:
        train_legs(out, legs)
    else:
        run_ranks(processes, "-m", "tests.distributed.group", out, json.dumps(legs))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_legs(Path(sys.argv[1]), [Leg(*values) for values in json.loads(sys.argv[2])])
    # a thread of a group that lives on may abort the process at its end
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in threads if "gloo" in name], threads
