"""Cache of compiled kernels. Loading one runs its code, so only this user may be able to write them.

A folder or a library is used only if it belongs to this user, is not a symbolic link, and nobody else can write to it. A library
ends with the digest of its content, so that a damaged one is never loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from discern.storage.checksums import cache_folder

_DIGEST_BYTES = 32


def private_folders() -> Iterator[Path]:
    """Folders for libraries, the preferred one first, created if missing, without those that others could write to.

    The first is the user's cache. The second, used if the first is not writable or not private, has a fixed name among the
    temporary files, and serves every run until the machine restarts.
    """
    with suppress(RuntimeError):  # this user has no home
        if _is_usable(folder := cache_folder().absolute()):
            yield folder
    if _is_usable(folder := Path(tempfile.gettempdir()).resolve() / f"discern-kernels-{os.geteuid()}"):
        yield folder


def is_sound(library: Path) -> bool:
    """Whether a library belongs to this user, cannot be written by others, and is complete."""
    try:
        if not _is_own(library, stat.S_ISREG):
            return False
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def keep(made: Path, target: Path) -> None:
    """Move a new library into place, with its digest appended."""
    content = made.read_bytes()
    made.write_bytes(content + hashlib.sha256(content).digest())
    made.chmod(0o700)  # regardless of the umask
    # Renamed into place: of ranks that start together, each writes a complete file.
    made.replace(target)


def _is_usable(folder: Path) -> bool:
    """Whether a folder exists or could be created, and is private to this user."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        return _is_own(folder, stat.S_ISDIR)
    except OSError:
        return False


def _is_own(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether `path` itself, not the target of a link, is of this kind, belongs to this user, and is not writable by others."""
    status = path.lstat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return kind(status.st_mode) and status.st_uid == os.geteuid() and not others_write


_FOLDER = Path(__file__).parent
# Without -ffast-math, because a NaN in a loss must remain NaN. Most of the speed comes from contraction to fused multiply-add.
# Without strict aliasing, because pairs of bfloat16 are read as 32 bits.
_FLAGS = "-std=gnu11 -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fno-strict-aliasing".split()
_FLAGS += ["-Wno-psabi", "-fPIC", "-fopenmp"]
_TIMEOUT = 120.0


@dataclass(frozen=True)
class Kernels:
    """The loaded library, or the reason why there is none.

    Attributes:
        library: None: the plain path is used.
        reason: why there is no library, or the path of the library.
    """

    library: ctypes.CDLL | None
    reason: str


@functools.cache
def load_kernels() -> Kernels:
    """Load the kernels, after compiling them on the first call on this machine (a few seconds). Never raises."""
    if os.environ.get("DISCERN_KERNELS", "1") == "0":
        return Kernels(None, "switched off by DISCERN_KERNELS=0")
    if sys.platform != "linux":
        return Kernels(None, f"not built on {sys.platform}")
    if (runtime := _openmp_runtime()) is None:
        return Kernels(None, "torch runs without OpenMP here")
    compilers = _compilers()
    if not compilers:
        return Kernels(None, "no C compiler found (looked for $CC, cc, gcc and clang)")
    result = Kernels(None, "torch runs with GCC's OpenMP, which code compiled by clang cannot use: install gcc")
    for compiler in compilers:
        try:
            version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT, check=True).stdout
            if runtime.name.startswith("libgomp") and b"clang" in version:
                continue  # it calls functions that only LLVM's OpenMP has
            return _loaded(compiler, version, runtime)
        except (OSError, subprocess.SubprocessError) as problem:
            result = Kernels(None, f"they could not be compiled: {_reason(problem)}")
    return result


def _loaded(compiler: str, version: bytes, runtime: Path) -> Kernels:
    """Load the kernels from the first folder that has them, or in which they can be built."""
    # The name is derived from all that the library depends on.
    parts = [path.read_bytes() for path in sorted(_FOLDER.glob("*.[ch]"))]
    parts += [version, " ".join(_FLAGS).encode(), runtime.name.encode(), platform.machine().encode(), _processor()]
    name = f"kernels-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:20]}.so"
    failure = "there is no writable folder for them that belongs to this user alone; set DISCERN_CACHE to one"
    for folder in private_folders():
        path = folder / name
        # A library that it was linked with may have been removed since: then it is compiled again.
        for is_built in (True, False) if is_sound(path) else (False,):
            try:
                if not is_built:
                    _compile(compiler, runtime, path)
                return Kernels(ctypes.CDLL(str(path)), str(path))
            except OSError as problem:  # a folder that cannot be written to, or from which nothing may be executed
                failure = f"they could not be stored or loaded: {_reason(problem)}"
    return Kernels(None, failure)


def _compilers() -> list[str]:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    found = [path for name in names if name and (path := shutil.which(name))]
    return list({os.path.realpath(path): path for path in reversed(found)}.values())[::-1]


def _openmp_runtime() -> Path | None:
    """The runtime that torch has loaded: a second one would start a second set of threads, which compete for the cores."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    loaded = (Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/") > 0)
    runtimes = [path for path in loaded if path.name.startswith(("libgomp", "libiomp", "libomp"))]
    # Other packages may load their own runtime. That of torch is in its folder, or is the one of the system.
    return min(runtimes, key=lambda path: Path(torch.__file__).parent not in path.parents, default=None)


def _compile(compiler: str, runtime: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "kernels.so"
        # Compiled and linked separately: linking with -fopenmp would add the system's runtime to that of torch.
        sources = sorted(_FOLDER.glob("*.c"))
        link = ["-shared", *(f"{path.stem}.o" for path in sources), str(runtime), "-lm", "-o", str(made)]
        for step in ([*_FLAGS, "-c", *map(str, sources)], link):
            subprocess.run(
                [compiler, *step], cwd=folder, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=True
            )
        keep(made, target)


def _processor() -> bytes:
    """The processor features behind -march=native: different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return b"".join(next((line for line in lines if line.startswith(key)), b"") for key in (b"model name", b"flags", b"Features"))


def _reason(problem: Exception) -> str:
    """The first error of a compiler, or the last line of what another program said."""
    said = str(getattr(problem, "stderr", None) or problem).strip().splitlines()
    errors = [line for line in said if "error:" in line]
    return (errors or said[-1:] or [type(problem).__name__])[0].strip()
