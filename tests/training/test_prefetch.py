"""Rows that are copied ahead: the same as those that the host corrupts, bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from discern.corruption import maskings
from discern.objectives.base import BuildSettings
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.training.distributed import Ranks
from discern.training.loop import train
from discern.training.prefetch import Feed, read_local_batch, read_onto_device
from discern.training.state import State, TrainContext
from discern.types import CorruptedBatch
from tests.support import settings
from tests.training.test_loop import context, stream, weights

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Operations whose results IEEE 754 or integer arithmetic prescribes to the last bit, and those that only move elements. Sums and
# minima are of integers.
EXACT = """add sub mul bitwise_and bitwise_or bitwise_xor bitwise_not __rshift__ __lshift__ __and__ __or__ __xor__ remainder
arange argsort sort masked_fill masked_fill_ where clamp minimum round lt le gt ge eq ne sum cumsum gather scatter_ scatter_add_
zeros zeros_like ones_like full scalar_tensor expand view unsqueeze select slice copy_ _to_copy clone lift_fresh detach any min
index_select _local_scalar_dense is_nonzero nonzero empty_like new_zeros t alias item logical_and logical_not floor_divide
_unsafe_view amin maximum constant_pad_nd""".split()


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the name of every operation, and sums of numbers that are not integers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        inexact = name in ("sum", "cumsum") and args[0].dtype.is_floating_point
        self.names.add(f"{name} of floats" if inexact else name)
        return func(*args, **(kwargs or {}))


def run(folder: Path, masking: str, **options: Any) -> TrainContext:
    built: BuildSettings = settings()
    counts = torch.arange(1, 51)
    built = replace(built, vocabulary=replace(built.vocabulary, token_counts=counts))
    objective = ReplacedTokenDetection(
        RTDConfig(masking=masking, mask_token_probability=0.8, random_token_probability=0.1), built
    )
    objective.initialize(0)
    return context(folder, objective, micro_batch_size=3, sequences_per_step=8, **options)


def compare(ours: CorruptedBatch, theirs: CorruptedBatch) -> None:
    """Every number and tensor of the two, and of their tokens, is equal."""
    assert ours.located.keys() == theirs.located.keys()
    located = ((places, theirs.located[which]) for which, places in ours.located.items())
    for left, right in ((ours, theirs), (ours.tokens, theirs.tokens), *located):
        for item in fields(left):
            one, other = getattr(left, item.name), getattr(right, item.name)
            if isinstance(one, Tensor):
                assert torch.equal(one, other.to(one.device)), item.name
            elif item.name == "drawn_again":
                assert all(torch.equal(each, again.to(each.device)) for each, again in zip(one, other, strict=True))
            elif item.name not in ("tokens", "spans", "located"):
                assert one == other, item.name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("packing", ["segments", "packed"])
@pytest.mark.parametrize("masking", sorted(maskings.names()))
def test_rows_on_a_device_are_those_of_the_host(tmp_path: Path, masking: str, packing: str, device: str) -> None:
    """For every masking, wherever it runs; 3, 3 and 2 rows."""
    ready = run(tmp_path, masking, source=stream(packing=packing))
    assert ready.objective.corrupts_anywhere == (masking in ("uniform", "whole-word"))
    for step in (0, 5):
        host = read_local_batch(ready, step)
        ahead = read_onto_device(ready, step, torch.device(device), spans=True, pin=device == "cuda")
        assert host.on_device is host.micro_batches
        assert len(ahead.on_device) == 3
        for (ours, numbers), (theirs, other) in zip(ahead.on_device, host.micro_batches, strict=True):
            compare(theirs, ours)
            assert torch.equal(numbers.examples.cpu(), other.examples)
            spans = ours.tokens.spans
            assert spans is not None
            # Little padding stays, in spans of its own.
            assert spans.offsets[-1] == (ours.num_tokens if spans.places is not None else ours.tokens.input_ids.numel())
        counts = [ready.objective.counts(batch) for batch, _ in host.micro_batches]
        assert [ready.objective.counts(batch) for batch, _ in ahead.micro_batches] == counts


@pytest.mark.parametrize("masking", sorted(maskings.names()))
def test_maskings_that_run_anywhere_round_nothing(tmp_path: Path, masking: str) -> None:
    """Logarithms, powers and sums differ between devices in their last bit, which can change what is chosen."""
    ready = run(tmp_path, masking)
    with Operations() as seen:
        read_local_batch(ready, 1)
    inexact = seen.names - set(EXACT)
    if ready.objective.corrupts_anywhere:
        assert not inexact
    else:
        assert inexact


def test_a_feed_reads_each_step_once_in_order(tmp_path: Path) -> None:
    ready = run(tmp_path, "uniform")
    with ThreadPoolExecutor(1) as reader:
        feed = Feed(ready, reader, 3)
        for step in (3, 4, 5):
            for (ours, _), (theirs, _) in zip(
                feed.take(step).micro_batches, read_local_batch(ready, step).micro_batches, strict=True
            ):
                compare(ours, theirs)


@needs_gpu
def test_a_run_on_a_gpu_equals_one_whose_rows_are_copied_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying ahead on another stream races with nothing: 40 steps end with the same weights."""
    found = []
    for ahead in (True, False):
        ready = run(tmp_path / str(ahead), "uniform", max_steps=40)
        ready = replace(ready, ranks=Ranks(0, 1, torch.device("cuda")), objective=ready.objective.cuda())
        if not ahead:
            monkeypatch.setattr(Feed, "take", lambda _, step, ready=ready: read_local_batch(ready, step))
        train(ready, State())
        found.append(weights(ready.objective))
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name])
