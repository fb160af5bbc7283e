"""Compile the kernels once a machine, and load them.

The library goes to a cache folder, under a name that says what it was made from: source, compiler, flags, processor and the
OpenMP runtime. `DISCERN_KERNELS=0` switches the kernels off, `DISCERN_CACHE` names another folder, `CC` another compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("kernels.c")
# No -ffast-math: a NaN in a loss must stay one. Contraction to fused multiply-add is where the speed is.
_FLAGS = [
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fopenmp",
]
_TIMEOUT = 120.0


@dataclass(frozen=True)
class Kernels:
    """The library, or why there is none.

    Attributes:
        library: loaded; None: the plain path is used.
        reason: what stands in the way, or where the library is.
    """

    library: ctypes.CDLL | None
    reason: str


@functools.cache
def load_kernels() -> Kernels:
    """The kernels, compiled if this machine hasn't yet (about five seconds). Never raises: there is always the plain path."""
    if os.environ.get("DISCERN_KERNELS", "1") == "0":
        return Kernels(None, "switched off by DISCERN_KERNELS=0")
    if sys.platform != "linux":
        return Kernels(None, f"not built on {sys.platform}")
    compiler = _compiler()
    if compiler is None:
        return Kernels(None, "no C compiler found (looked for $CC, cc, gcc and clang)")
    runtime = _openmp_runtime()
    if runtime is None:
        return Kernels(None, "torch runs without OpenMP here")
    try:
        path = _built(compiler, runtime)
        return Kernels(ctypes.CDLL(str(path)), str(path))
    except (OSError, subprocess.SubprocessError) as problem:
        return Kernels(None, _last_line(problem))


def _compiler() -> str | None:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _openmp_runtime() -> Path | None:
    """The one that torch has loaded: a second would bring a second set of threads, which fight over the cores."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    loaded = (Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/") > 0)
    return next((path for path in loaded if path.name.startswith(("libgomp", "libiomp", "libomp"))), None)


def _built(compiler: str, runtime: Path) -> Path:
    """The compiled library; compiled now if its name isn't in the cache."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT, check=True).stdout
    parts = [_SOURCE.read_text(), version, " ".join(_FLAGS), runtime.name, platform.machine(), _processor()]
    name = f"kernels-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:20]}.so"
    folder = _cache_folder()
    if (folder / name).is_file():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _compile(compiler, runtime, folder / name)
    except OSError:
        # A home that can't be written to. A folder that others know the name of is no place for code: a fresh one, then.
        return _compile(compiler, runtime, Path(tempfile.mkdtemp(prefix="discern-kernels-")) / name)


def _compile(compiler: str, runtime: Path, target: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "kernels.so"
        # Compiled and linked apart: -fopenmp at the link would pull in the system's runtime beside torch's.
        steps = [
            [compiler, *_FLAGS, "-c", str(_SOURCE), "-o", f"{folder}/kernels.o"],
            [compiler, "-shared", f"{folder}/kernels.o", str(runtime), "-lm", "-o", str(made)],
        ]
        for step in steps:
            subprocess.run(step, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
        # Renamed into place: ranks that start together each bring a whole file.
        made.replace(target)
    return target


def _cache_folder() -> Path:
    if given := os.environ.get("DISCERN_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "discern"


def _processor() -> str:
    """What -march=native looks at: a home may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags", "Features"))


def _last_line(problem: Exception) -> str:
    said = getattr(problem, "stderr", None) or str(problem)
    return f"the C compiler failed: {said.strip().splitlines()[-1] if said.strip() else type(problem).__name__}"
