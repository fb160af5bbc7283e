"""An export appears whole or not at all, and destroys nothing that is not an export."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from discern.artifacts.export_folder import FILES, check_target, publish
from discern.errors import DataError
from discern.interop.config_json import MARK
from discern.interop.names import CONFIG_NAME, HEAD_NAME, WEIGHTS_NAME
from discern.storage.checksums import CHECKSUMS_NAME


def fill(folder: Path, word: str = "new") -> None:
    for name in FILES:
        (folder / name).write_text(json.dumps({MARK: {"networks": ["first", "second"]}, "word": word}))


def an_export(folder: Path, word: str = "old") -> Path:
    folder.mkdir()
    fill(folder, word)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != CHECKSUMS_NAME}


def test_a_new_folder_and_its_parents(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    check_target(out)
    publish(out, fill)
    assert sorted(contents(out)) == sorted(FILES)
    assert [path.name for path in out.parent.iterdir()] == ["b"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    check_target(out)
    publish(out, fill)
    assert sorted(contents(out)) == sorted(FILES)


def test_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    out = an_export(tmp_path / "out")
    check_target(out)
    publish(out, fill)
    assert all("new" in text for text in contents(out).values())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_through_a_link(tmp_path: Path) -> None:
    an_export(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    check_target(tmp_path / "link")
    publish(tmp_path / "link", fill)
    assert (tmp_path / "link").is_symlink()
    assert "new" in contents(tmp_path / "real")["config.json"]


def test_somebody_elses_files_are_safe(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mother.txt").touch()
    with pytest.raises(DataError, match=r"not an earlier export \(it holds mother\.txt\)"):
        check_target(tmp_path / "letters")


def test_somebody_elses_model_is_safe(tmp_path: Path) -> None:
    out = an_export(tmp_path / "downloaded")
    (out / "config.json").write_text(json.dumps({"model_type": "electra"}))
    with pytest.raises(DataError, match="not an earlier export"):
        check_target(out)


def test_what_was_added_to_an_export_is_safe(tmp_path: Path) -> None:
    out = an_export(tmp_path / "out")
    (out / "notes.txt").touch()
    with pytest.raises(DataError, match=r"also holds notes\.txt"):
        check_target(out)


def test_an_earlier_export_of_several_networks_is_replaced(tmp_path: Path) -> None:
    out = an_export(tmp_path / "out")
    (out / HEAD_NAME).touch()
    (out / "second").mkdir()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        (out / "second" / name).touch()
    check_target(out)
    publish(out, fill)
    assert sorted(contents(out)) == sorted(FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("added", ["second/notes.txt", "third/model.safetensors"])
def test_what_was_added_to_the_folders_of_an_export_is_safe(added: str, tmp_path: Path) -> None:
    out = an_export(tmp_path / "out")
    (out / added).parent.mkdir()
    (out / added).touch()
    with pytest.raises(DataError, match=r"also holds (second/notes\.txt|third),"):
        check_target(out)


def test_a_file_is_safe(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(DataError, match="is a file"):
        check_target(tmp_path / "out")


def test_a_disk_that_is_full_leaves_the_earlier_export(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    out = an_export(tmp_path / "out")
    before = contents(out)
    with pytest.raises(DataError, match="No space left on device"):
        publish(out, write)
    assert contents(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interruption_leaves_the_earlier_export(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise KeyboardInterrupt

    out = an_export(tmp_path / "out")
    before = contents(out)
    with pytest.raises(KeyboardInterrupt):
        publish(out, write)
    assert contents(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_was_put_there_while_the_export_was_made_is_safe(tmp_path: Path) -> None:
    out = an_export(tmp_path / "out")
    check_target(out)
    (out / "notes.txt").touch()
    with pytest.raises(DataError, match=r"also holds notes\.txt"):
        publish(out, fill)
    assert (out / "notes.txt").exists()
