"""The wheel and the sdist: what they hold, and that the wheel works in an environment that has never seen this repository.

The environment is new, and the wheel is installed into it by pip. Only the dependencies are those of the tests: a `.pth` file
names their folder, as installing torch afresh would take gigabytes. A `.pth` file inside a folder that is so named is not
read, so the editable install of the tests is not there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_PYTHON = ("*.toml", "*.c", "*.h", "*.html", "*.js", "*.css", "*.j2", "py.typed", "*.json")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel; the sdist is next to it."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out)
    (built,) = out.glob("discern_nlp-*.whl")
    return built


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, symlinks=True)
    python = str(home / "bin" / "python")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, str(wheel)], check=True)
    dependencies = sysconfig.get_path("purelib")
    (packages,) = (home / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return home


def build(source: Path, out: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", out], cwd=source, check=True)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}


def said(*command: object, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_that_is_no_python_is_in_the_wheel(wheel: Path) -> None:
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for pattern in NOT_PYTHON
        for path in (source / "discern").rglob(pattern)
        if "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as opened:
        held = set(opened.namelist())
    assert expected <= held
    assert {"discern/config/presets/electra-small.toml", "discern/kernels/attention.c", "discern/report/page.html"} <= held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    strangers = [name for name in held if not name.startswith(("discern/", "discern_nlp-"))]
    assert not strangers


def test_builds_are_reproducible(wheel: Path, tmp_path: Path) -> None:
    """The sdist, whose files have other times, builds the same wheel and the same sdist in another folder."""
    (sdist,) = wheel.parent.glob("*.tar.gz")
    assert sdist.stat().st_size < 3_000_000
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    build(tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path)
    for path in (wheel, sdist):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_it_runs_where_it_is_installed(home: Path, tmp_path: Path) -> None:
    python, discern = home / "bin" / "python", home / "bin" / "discern"
    where = said(python, "-c", "import discern; print(discern.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(home)
    assert "demo" in said(discern, "--help", cwd=tmp_path)
    assert "electra-small" in said(discern, "config", "presets", cwd=tmp_path)


def test_the_demo_starts(home: Path, tmp_path: Path) -> None:
    """It has begun to read; the rest is the slow test's."""
    command = [home / "bin" / "discern", "demo", "--out", tmp_path / "demo", "--minutes", "0.05"]
    with (tmp_path / "err").open("w") as told:
        running = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=told)
        try:
            until = time.monotonic() + 120
            while running.poll() is None and not (tmp_path / "err").stat().st_size and time.monotonic() < until:
                time.sleep(0.1)
            assert running.poll() is None, (tmp_path / "err").read_text()
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 143, (tmp_path / "err").read_text()
        finally:
            running.kill()
    assert "Traceback" not in (tmp_path / "err").read_text()


@pytest.mark.slow
def test_the_demo_ends(home: Path, tmp_path: Path) -> None:
    said(home / "bin" / "discern", "demo", "--out", tmp_path / "demo", "--minutes", "0.05", cwd=tmp_path)
    assert list((tmp_path / "demo").rglob("*.html"))
