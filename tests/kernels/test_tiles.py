"""Attention by tiles (Intel's AMX), on any processor: a model of the instructions in C takes their place."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from discern import kernels
from discern.kernels import build
from tests.kernels.test_kernels import DIRECTED, DIRECTIONS, LENGTHS, angles, compare, double_attention, draws, offsets, rotated
from tests.paths import on_path

MODEL = Path(__file__).parent / "tile_model.h"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels with the model."""
    next(on_path("kernels"))  # skips where nothing can be built
    compiler, runtime = build._compilers()[0], build._openmp_runtime()
    assert runtime is not None
    target = tmp_path_factory.mktemp("kernels") / "tiles.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", [*build._FLAGS, "-DDISCERN_TILE_MODEL", "-include", str(MODEL)])
        build._compile(compiler, runtime, target)
    return ctypes.CDLL(str(target))


@pytest.fixture
def tiles(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load_kernels", lambda: build.Kernels(library, "with the model of tiles"))


def results(size: int, heads: int, window: int | None, probability: float = 0.0) -> list[torch.Tensor]:
    packed = draws(sum(LENGTHS), 3 * size * heads, low=True)
    torch.manual_seed(0)
    values = kernels.attention(packed, heads, offsets(LENGTHS), probability, window)
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(9))
    return [values.detach(), *torch.autograd.grad((values.float() * weights).sum(), packed)]


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize(("size", "heads"), [(1, 1), (20, 3), (32, 2), (48, 1), (64, 1), (80, 1)])
@pytest.mark.usefixtures("tiles")
def test_values_and_gradients(size: int, heads: int, window: int | None) -> None:
    packed = draws(sum(LENGTHS), 3 * size * heads, low=True)
    ours = kernels.attention(packed, heads, offsets(LENGTHS), 0.0, window)
    compare(ours, double_attention(packed, heads, LENGTHS, window), [packed], 0.02)


def test_they_are_those_of_the_other_products(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, for any number of threads; but for the order of the sums."""
    expected = results(64, 3, 64, 0.1)
    monkeypatch.setattr(kernels, "load_kernels", lambda: build.Kernels(library, "with the model of tiles"))
    ours, threads = results(64, 3, 64, 0.1), torch.get_num_threads()
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert all(map(torch.equal, ours, results(64, 3, 64, 0.1)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("tiles")
def test_in_one_direction() -> None:
    packed = draws(sum(DIRECTED), 3 * 48 * 2, low=True)
    ours = kernels.attention(packed, 2, offsets(DIRECTED), 0.0, 64, directions=DIRECTIONS)
    compare(ours, double_attention(packed, 2, DIRECTED, 64, directions=DIRECTIONS), [packed], 0.02)


@pytest.mark.usefixtures("tiles")
def test_rotated() -> None:
    packed, tables = draws(70, 3 * 48 * 2, low=True), angles(70, 48)
    ours = kernels.attention(packed, 2, offsets([70]), 0.0, rotation=tables)
    reference = double_attention(rotated(packed, 2, *tables, torch.arange(70)), 2, [70], None)
    compare(ours, reference, [packed], 0.02)
