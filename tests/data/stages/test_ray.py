"""The stages on a Ray cluster: the bytes of one process, also when a machine dies in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from discern.data.dataset.build import BuildOptions
from discern.data.prepare import prepare
from discern.data.stages import plan as planning
from discern.data.stages.engines import engine_of
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError
from discern.progress import Silent
from tests.data.small_text import made_up, plain, write_vocabulary

pytest.importorskip("ray", reason="the extra 'ray' is not installed")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(plain(made_up(40, seed=number)))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_cluster_on_this_machine(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SMALLEST_PIECE", 1)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    choice = TokenizerChoice(write_vocabulary(text.parent / "vocab.txt"))
    build = BuildOptions(heldout=0.1, workers=2, shard_tokens=3000, near_duplicates=0.9)
    for out, engine in (("whole", "local"), ("ray", "ray")):
        prepare((str(text),), out=text.parent / out, tokenizer=choice, build=build, engine=engine, progress=Silent())  # type: ignore[arg-type]
    assert contents(text.parent / "ray") == contents(text.parent / "whole")
    assert not list(text.parent.glob(".*"))


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discern.data.stages.ray_engine.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed") as raised:
        engine_of("ray", 1)
    assert "discern-nlp[ray]" in str(raised.value.hint)


def test_an_address_where_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(DataError, match="no Ray cluster answers at RAY_ADDRESS=127"):
        engine_of("ray", 1)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Two machines of one processor each, as processes of this machine."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield found
    found.shutdown()


@pytest.mark.slow
def test_a_machine_that_dies_in_the_middle_costs_nothing(tmp_path: Path, cluster: object) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):  # each file is larger than the smallest piece
        (text / f"{number}.txt").write_text(plain(made_up(6000, seed=number)))
    options = ["--tokenizer", str(write_vocabulary(tmp_path / "vocab.txt"))]
    program = [sys.executable, "-m", "discern", "prepare", str(text), *options]
    second = cluster.add_node(num_cpus=1)  # type: ignore[attr-defined]
    environment = os.environ | {"RAY_ADDRESS": cluster.address}  # type: ignore[attr-defined]
    arguments = [*program, "--out", str(tmp_path / "ray"), "--engine", "ray", "--json"]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as running:
        pieces = tmp_path / ".ray.parts" / "pieces"
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not any(pieces.glob("*/done.json")):
            time.sleep(0.1)
        assert running.poll() is None, "the command ended before the machine died"
        cluster.remove_node(second, allow_graceful=False)  # type: ignore[attr-defined]
        printed, _ = running.communicate(timeout=600)
    assert running.returncode == 0
    assert json.loads(printed)["documents"] == 48000
    subprocess.run([*program, "--out", str(tmp_path / "whole"), "--workers", "1"], check=True, capture_output=True)
    assert contents(tmp_path / "ray") == contents(tmp_path / "whole")
