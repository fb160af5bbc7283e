"""Building the kernels, and what stands in the way."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from discern import kernels
from discern.kernels import build
from discern.kernels.build import Kernels
from tests.paths import on_path


def load_afresh() -> Kernels:
    return build.load_kernels.__wrapped__()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    next(on_path("kernels"))  # skips where nothing can be built anyway
    monkeypatch.setenv("DISCERN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_built_once(cache: Path) -> None:
    first = load_afresh()
    assert first.library is not None
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    assert load_afresh().reason == first.reason == str(made)
    assert made.stat().st_mtime_ns == before


def test_another_source_is_another_library(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_afresh()
    shutil.copytree(build._FOLDER, tmp_path / "source")
    with (tmp_path / "source" / "joints.c").open("a") as file:
        file.write("\n/* changed */\n")
    monkeypatch.setattr(build, "_FOLDER", tmp_path / "source")
    load_afresh()
    assert len(list(cache.iterdir())) == 2


def test_it_can_be_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCERN_KERNELS", "0")
    assert load_afresh() == Kernels(None, "switched off by DISCERN_KERNELS=0")


def test_without_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    found = load_afresh()
    assert found.library is None
    assert "no C compiler" in found.reason


def test_with_a_source_that_does_not_compile(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.c").write_text("int broken(void) { return }\n")
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    found = load_afresh()
    assert found.library is None
    assert found.reason.startswith("they could not be compiled")
    assert not any(cache.iterdir())


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next(on_path("kernels"))
    for name in ("DISCERN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = load_afresh()
    assert found.library is not None, found.reason
    assert found.reason.startswith(str(tmp_path))


def test_a_relative_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISCERN_CACHE", ".")
    assert load_afresh().library is not None


def test_what_was_built_long_ago_is_removed(cache: Path) -> None:
    cache.mkdir()
    old, recent = cache / "kernels-0.so", cache / "kernels-1.so"
    for path in (old, recent):
        path.touch()
    os.utime(old, (0, 0))
    load_afresh()
    assert not old.exists()
    assert recent.exists()


def test_a_library_that_cannot_be_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(compiler: str, runtime: Path, target: Path) -> Path:
        target.write_bytes(b"not a library")
        return target

    monkeypatch.setattr(build, "_compile", spoiled)
    found = load_afresh()
    assert found.library is None
    assert found.reason.startswith("they could not be loaded")


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next(on_path("kernels"))
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DISCERN_CACHE", str(blocked / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = load_afresh()
    assert found.library is not None
    assert found.reason.startswith(str(tmp_path / "discern-kernels-"))


def test_torchs_own_threads_are_used() -> None:
    next(on_path("kernels"))
    kernels.dropout(torch.ones(100, 1000), 0.1)
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    runtimes = {os.path.realpath(path) for path in libraries if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    # scikit-learn brings one of its own where it is imported; the kernels add none.
    assert len({path for path in runtimes if "scikit_learn" not in path}) == 1
