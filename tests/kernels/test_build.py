"""Building the kernels, and what stands in the way."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from discern import kernels
from discern.kernels import build
from discern.kernels.build import Kernels, is_sound, keep, private_folders
from tests.paths import on_path


def load_afresh() -> Kernels:
    return build.load_kernels.__wrapped__()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    next(on_path("kernels"))  # skips where nothing can be built anyway
    monkeypatch.setenv("DISCERN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The places that libraries are compiled for; what is put there is a copy, which takes no time."""
    next(on_path("kernels"))  # skips where nothing can be built anyway
    library = Path(build.load_kernels().reason).read_bytes()[:-32]  # without the digest
    places: list[Path] = []

    def copied(compiler: str, runtime: Path, target: Path) -> None:
        with TemporaryDirectory(dir=target.parent) as folder:
            places.append(target)
            (Path(folder) / "made").write_bytes(library)
            keep(Path(folder) / "made", target)

    monkeypatch.setattr(build, "_compile", copied)
    return places


def test_it_is_built_once_for_each_source(
    cache: Path, tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_afresh().reason == load_afresh().reason == str(*compiled)
    shutil.copytree(build._FOLDER, tmp_path / "source")
    (tmp_path / "source" / "more.c").touch()
    monkeypatch.setattr(build, "_FOLDER", tmp_path / "source")
    load_afresh()
    assert sorted(cache.iterdir()) == sorted(compiled)
    assert len(compiled) == 2


def test_a_clang_is_passed_over_where_torch_runs_with_the_openmp_of_gcc(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clang").write_text("#!/bin/sh\necho clang version 22.1.0\n")
    (tmp_path / "clang").chmod(0o755)
    monkeypatch.setattr(build, "_openmp_runtime", lambda found=build._openmp_runtime(): found)
    monkeypatch.setenv("CC", str(tmp_path / "clang"))
    assert load_afresh().library is not None
    monkeypatch.setattr(build, "_compilers", lambda: [str(tmp_path / "clang")])
    assert "install gcc" in load_afresh().reason


def spoiled(compiler: str, runtime: Path, target: Path) -> None:
    target.write_bytes(b"no library")
    keep(target, target)


@pytest.mark.parametrize(
    "reason",
    ["switched off by DISCERN_KERNELS=0", "no C compiler", "they could not be compiled", "they could not be stored or loaded"],
)
def test_why_there_are_none(cache: Path, tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if "switched off" in reason:
        monkeypatch.setenv("DISCERN_KERNELS", "0")
    elif "no C compiler" in reason:
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.delenv("CC", raising=False)
    elif "compiled" in reason:
        (tmp_path / "broken.c").write_text("int broken(void) { return }\n")
        monkeypatch.setattr(build, "_FOLDER", tmp_path)
    else:
        monkeypatch.setattr(build, "_compile", spoiled)
    loaded = load_afresh()
    assert loaded.library is None
    assert loaded.reason.startswith(reason)


def test_a_user_without_a_home(tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISCERN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert load_afresh().library is not None
    assert compiled[0].is_relative_to(tmp_path)


SPOILED: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:9999]),  # loading it would end the process
    "changed": lambda path: path.write_bytes(b"\1" + path.read_bytes()[1:]),
    "sound, but no library": lambda path: spoiled("", path, path),
    "others may write to it": lambda path: path.chmod(0o770),
    "a link": lambda path: path.symlink_to(path.rename(path.with_suffix(".moved"))),
    "another user's": lambda path: os.chown(path, 12345, 12345),
}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize("why", [*list(SPOILED)[:-1], pytest.param("another user's", marks=as_root)])
def test_a_library_that_is_damaged_or_not_the_users_own_is_built_again(
    cache: Path, why: str, compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = cache.with_name("other") / Path(load_afresh().reason).name
    monkeypatch.setenv("DISCERN_CACHE", str(library.parent))
    assert next(private_folders()) == library.parent
    shutil.copy(compiled.pop(), library)
    SPOILED[why](library)
    loaded = load_afresh()
    assert (loaded.library is not None, loaded.reason, compiled) == (True, str(library), [library])
    assert is_sound(library)
    assert library.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("why", ["others may write to it", "a link", pytest.param("another user's", marks=as_root)])
def test_a_folder_that_is_not_the_users_own_is_left_alone(
    cache: Path, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache.mkdir(0o700)
    SPOILED[why](cache)
    private = tmp_path / f"discern-kernels-{os.geteuid()}"
    assert list(private_folders()) == [private]
    assert private.stat().st_mode & 0o777 == 0o700
    private.rmdir()
    (tmp_path / "target").mkdir()
    private.symlink_to(tmp_path / "target")  # somebody was there first
    loaded = load_afresh()
    assert loaded.library is None
    assert "set DISCERN_CACHE to one" in loaded.reason
    assert not any((tmp_path / "target").iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DISCERN_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert load_afresh().reason == load_afresh().reason == str(*compiled)
    assert compiled[0].parent == tmp_path / f"discern-kernels-{os.geteuid()}"


def test_torchs_own_threads_are_used() -> None:
    next(on_path("kernels"))
    kernels.dropout(torch.ones(100, 1000), 0.1)
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    runtimes = {os.path.realpath(path) for path in libraries if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    # scikit-learn and sentencepiece bring one of their own where they are imported; the kernels add none.
    assert len({path for path in runtimes if not re.search("scikit_learn|sentencepiece", path)}) == 1
