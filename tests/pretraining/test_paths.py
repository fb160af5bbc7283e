"""Folders whose names are not UTF-8, and names that no disk takes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from discern.artifacts.opening import open_model
from discern.artifacts.run import load_run
from discern.config.layers import read_file
from discern.convert.export import export
from discern.data.dataset.build import BuildOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.parsing import toml_tables
from discern.progress import Silent
from discern.storage.files import utf8_name, whole_file, write_text
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


def test_a_run_and_its_exports(folder: Path) -> None:
    make_run(folder / "run")
    assert load_run(folder / "run", warn=pytest.fail).step == 20
    export(folder / "run", out=folder / "one", all_networks=True, progress=Silent(), warn=pytest.fail)
    export(folder / "one", out=folder / "two", progress=Silent(), warn=pytest.fail)
    model = open_model(folder / "two", warn=pytest.fail)
    assert "discriminator" in model.networks()


def test_a_data_set_names_its_inputs(folder: Path, tmp_path: Path) -> None:
    text = folder / os.fsdecode(b"t\xeaxt")
    text.write_text("The old town.\nIt has a river.\n\nThe new town.\n" * 20)
    make_run(tmp_path / "run")
    choice = TokenizerChoice(path=tmp_path / "run" / "tokenizer.json")
    prepare([str(text)], out=folder / "data", tokenizer=choice, build=BuildOptions(heldout=0.1, workers=1), progress=Silent())
    manifest = json.loads((folder / "data" / "manifest.json").read_text(encoding="utf-8"))
    assert text.name in manifest["inputs"][0] or str(text) in str(manifest["inputs"])


def test_files_that_name_such_paths_are_utf8_and_read_back(folder: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", json.dumps({"path": str(folder)}, ensure_ascii=False))
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"path": str(folder)}
    with whole_file(tmp_path / "b.toml") as file:
        file.write(f'[a]\n"k" = ["{folder}", "Caf\u00e9"]\n')
    assert toml_tables((tmp_path / "b.toml").read_text(encoding="utf-8")) == {"a": {"k": [str(folder), "Café"]}}
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
