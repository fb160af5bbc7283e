"""Building the kernels, and what stands in the way."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

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


def test_it_is_built_once(cache: Path) -> None:
    first = load_afresh()
    assert first.library is not None
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    assert load_afresh().reason == first.reason == str(made)
    assert made.stat().st_mtime_ns == before


def test_another_source_is_another_library(
    cache: Path, tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_with_a_source_that_does_not_compile(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.c").write_text("int broken(void) { return }\n")
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    found = load_afresh()
    assert found.library is None
    assert found.reason.startswith("they could not be compiled")
    assert not any(cache.iterdir())


def test_a_user_without_a_home(tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISCERN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = load_afresh()
    assert found.library is not None, found.reason
    assert found.reason.startswith(str(tmp_path))


def test_a_relative_cache(cache: Path, tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISCERN_CACHE", ".")
    assert load_afresh().library is not None


def test_a_library_that_cannot_be_loaded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def spoiled(compiler: str, runtime: Path, target: Path) -> None:
        made.append(target)
        (target.parent / "made").write_bytes(b"not a library")
        keep(target.parent / "made", target)

    monkeypatch.setattr(build, "_compile", spoiled)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = load_afresh()
    assert found.library is None
    assert found.reason.startswith("they could not be stored or loaded")
    assert [path.parent for path in made] == [cache, tmp_path / f"discern-kernels-{os.geteuid()}"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_library_is_built_again(cache: Path, damage: str, compiled: list[Path]) -> None:
    """A cut one is never loaded: that would end the process."""
    (made,) = (Path(load_afresh().reason),)
    content = made.read_bytes()
    middle = len(content) // 2
    made.write_bytes(
        {
            "cut": content[:middle],
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "empty": b"",
        }[damage]
    )
    compiled.clear()
    found = load_afresh()
    assert found.library is not None
    assert found.reason == str(made)
    assert compiled == [made]
    assert is_sound(made)


def test_a_sound_library_that_cannot_be_loaded_is_built_again(
    cache: Path, tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other" / Path(load_afresh().reason).name
    monkeypatch.setenv("DISCERN_CACHE", str(other.parent))
    assert next(private_folders()) == other.parent
    (tmp_path / "made").write_bytes(b"no library")
    keep(tmp_path / "made", other)
    compiled.clear()
    found = load_afresh()
    assert (found.library is not None, found.reason) == (True, str(other))
    assert compiled == [other]


@pytest.mark.parametrize("who", ["others may write to it", "a link", "another user's"])
def test_only_what_is_the_users_own_is_loaded(cache: Path, tmp_path: Path, who: str, compiled: list[Path]) -> None:
    made = Path(load_afresh().reason)
    if who == "a link":
        made.rename(tmp_path / "elsewhere.so")
        made.symlink_to(tmp_path / "elsewhere.so")
    elif who == "others may write to it":
        made.chmod(0o770)
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(made, 12345, 12345)
    compiled.clear()
    assert load_afresh().library is not None
    assert compiled == [made]
    assert is_sound(made)
    assert made.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("who", ["others may write to it", "a link", "another user's"])
def test_a_folder_that_is_not_the_users_own_is_left_alone(
    cache: Path, tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "target").mkdir()
    if who == "a link":
        cache.symlink_to(tmp_path / "target")
    else:
        cache.mkdir()
        cache.chmod(0o777 if who == "others may write to it" else 0o700)
    if who == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give folders away")
        os.chown(cache, 12345, 12345)
    private = tmp_path / f"discern-kernels-{os.geteuid()}"
    assert list(private_folders()) == [private]
    assert private.stat().st_mode & 0o777 == 0o700
    private.rmdir()
    private.symlink_to(tmp_path / "target")  # somebody was there first
    found = load_afresh()
    assert found.library is None
    assert "set DISCERN_CACHE to one" in found.reason
    assert not any((tmp_path / "target").iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DISCERN_CACHE", str(blocked / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for _ in range(3):  # built once, and nothing is left about
        found = load_afresh()
        assert found.library is not None
        assert found.reason.startswith(str(tmp_path / f"discern-kernels-{os.geteuid()}/kernels-"))
    assert len(compiled) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_torchs_own_threads_are_used() -> None:
    next(on_path("kernels"))
    kernels.dropout(torch.ones(100, 1000), 0.1)
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    runtimes = {os.path.realpath(path) for path in libraries if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    # scikit-learn brings one of its own where it is imported; the kernels add none.
    assert len({path for path in runtimes if "scikit_learn" not in path}) == 1
