"""Folders whose names are not UTF-8."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from discern.config.resolve import read_file
from discern.model_files.export import export
from discern.model_files.folder import open_model
from discern.progress import Silent
from discern.storage.files import utf8_name, whole_file, write_text
from tests.pretraining.test_evaluate import prepared
from tests.small.run import make_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One whose name is Latin-1."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xe9p\xf4t"))
    try:
        path.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    return path


def test_a_run_its_exports_and_its_data_set(folder: Path) -> None:
    make_run(folder / "run")
    export(folder / "run", out=folder / "one", all_networks=True, progress=Silent(), warn=pytest.fail)
    export(folder / "one", out=folder / "two", progress=Silent(), warn=pytest.fail)
    assert "discriminator" in open_model(folder / "two", warn=pytest.fail).networks()
    data = prepared(folder / os.fsdecode(b"t\xeaxt"), folder / "run" / "tokenizer.json")
    manifest = json.loads((data / "manifest.json").read_text(encoding="utf-8"))
    assert str(data.with_suffix(".txt")) in manifest["inputs"][0]


def test_files_that_name_such_paths_are_utf8_and_read_back(folder: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", json.dumps({"path": str(folder)}, ensure_ascii=False))
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"path": str(folder)}
    with whole_file(tmp_path / "b.toml") as file:
        file.write(f'[a]\n"k" = ["{folder}", "Caf\u00e9"]\n')
    assert read_file(tmp_path / "b.toml")["a.k"].value == [str(folder), "Café"]


def test_a_library_that_takes_utf8_alone_gets_such_a_name(folder: Path) -> None:
    (folder / "x").write_text("content")
    with utf8_name(folder / "x") as name:
        name.as_posix().encode()
        assert name.read_text() == "content"
    assert not name.exists()
    assert (folder / "x").exists()
    with utf8_name(Path("/plain/Café")) as name:
        assert name == Path("/plain/Café")
