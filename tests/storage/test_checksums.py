"""Checksums: what is written beside files is compared when they are read, and a large file is hashed once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from discern.errors import CheckpointError, DataError
from discern.kernels.build import private_folders
from discern.storage import checksums
from discern.storage.checksums import (
    CHECKSUMS_NAME,
    VARIABLE,
    checksum,
    digest_of,
    has_file,
    make_cache_folder,
    read_checksums,
    record_checksums,
    remove_recorded,
    verify,
    write_checksums,
    write_recorded,
)

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # sha256 of nothing


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "words.txt"
    path.parent.mkdir()
    path.write_text("one two\n")
    record_checksums(path.parent, ["words.txt"])
    return path


def test_a_file_is_what_was_written(file: Path) -> None:
    assert read_checksums(file.parent) == {"words.txt": checksum(file)}
    verify(file)
    verify(file, b"one two\n")


def test_a_changed_file_is_named_with_what_to_type(file: Path) -> None:
    file.write_text("one twi\n")
    with pytest.raises(CheckpointError, match=r"words\.txt is damaged or was edited: its SHA-256 is \w{12}\.\.\.") as caught:
        verify(file, error=CheckpointError)
    assert str(caught.value.hint).endswith(f"discern doctor --accept {file.parent}")
    with pytest.raises(DataError):
        verify(file, b"one twi\n")


@pytest.mark.parametrize("value", ["0", "off", "no", "False"])
def test_it_can_be_switched_off(value: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("one twi\n")
    monkeypatch.setenv(VARIABLE, value)
    verify(file)


def test_files_without_a_checksum_are_refused_in_folders_of_discern_only(tmp_path: Path, file: Path) -> None:
    (tmp_path / "else.txt").write_text("anything")
    verify(tmp_path / "else.txt")
    (file.parent / "else.txt").write_text("anything")
    with pytest.raises(DataError, match=r"else\.txt has no checksum in checksums\.json"):
        verify(file.parent / "else.txt")
    verify(file.parent / "else.txt", log=True)
    (tmp_path / "config.json").write_text('{"model_type": "electra"}')
    verify(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"model_type": "electra", "discern": {}}')
    with pytest.raises(DataError, match=r"checksums\.json is missing"):
        verify(tmp_path / "config.json")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": "b"}', "\x00\xff", "[" * 100_000])
def test_a_damaged_list_is_no_reason_to_trust(content: str, file: Path) -> None:
    (file.parent / CHECKSUMS_NAME).write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"checksums\.json is damaged"):
        verify(file)
    write_checksums(file.parent, {"words.txt": checksum(file)})
    verify(file)


def test_files_are_added_to_a_list(file: Path) -> None:
    (file.parent / "more.txt").touch()
    record_checksums(file.parent, ["more.txt"])
    assert read_checksums(file.parent) == {"words.txt": checksum(file), "more.txt": EMPTY}
    assert sorted(path.name for path in file.parent.iterdir()) == [CHECKSUMS_NAME, "more.txt", "words.txt"]


def test_a_large_file_is_hashed_once_a_machine_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCERN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checksums, "_WORTH_REMEMBERING", 1)
    hashed: list[Path] = []

    def counted(path: Path) -> str:
        hashed.append(path)
        return checksum(path)

    monkeypatch.setattr(checksums, "checksum", counted)
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 99)
    before = time.time() - 60
    os.utime(path, (before, before))
    monkeypatch.setattr(checksums, "_settled", lambda stamp, age: True)  # a file that is written now has a change time of now
    digests = {digest_of(path) for _ in range(3)}
    checksums._hashed.clear()  # as in another process
    digests.add(digest_of(path))
    assert (len(digests), len(hashed)) == (1, 1)
    (note,) = (tmp_path / "cache" / "verified").iterdir()
    assert json.loads(note.read_text())["file"] == str(path)

    path.write_bytes(b"y" * 99)
    os.utime(path, (before, before))  # the size and the time of modification are as they were
    assert digest_of(path) not in digests
    note.write_text("damaged")
    checksums._hashed.clear()
    assert digest_of(path) not in digests
    assert len(hashed) == 3


def test_a_file_written_a_moment_ago_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCERN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checksums, "_WORTH_REMEMBERING", 1)
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 99)
    digest_of(path)
    assert not (tmp_path / "cache").exists()


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    write_checksums(tmp_path, {"gone.txt": EMPTY})
    with pytest.raises(DataError, match=r"gone\.txt cannot be read: No such file"):
        verify(tmp_path / "gone.txt")


@pytest.mark.skipif(os.name != "posix", reason="umask")
def test_the_cache_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes it first: kernels are loaded from no folder that others may write to, and umask 002 lets a group write."""
    monkeypatch.setenv("DISCERN_CACHE", str(tmp_path / "new" / "cache"))
    before = os.umask(0o002)
    try:
        made = make_cache_folder("verified")
    finally:
        os.umask(before)
    assert made == tmp_path / "new" / "cache" / "verified"
    assert made.is_dir()
    assert next(private_folders()) == tmp_path / "new" / "cache"


@pytest.mark.parametrize("change", ["replace", "add", "remove"])
def test_wherever_a_process_is_killed_the_folder_is_as_before_or_after(
    change: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a run goes on with more steps, and its config.toml is written anew."""
    name = "more.txt" if change == "add" else file.name
    real, calls = Path.replace, []
    real_unlink = Path.unlink

    def kill_at(limit: int) -> None:
        calls.clear()

        def renamed(path: Path, target: Path) -> Path:
            calls.append(target.name)
            if len(calls) > limit:
                raise KeyboardInterrupt
            return real(path, target)

        def unlinked(path: Path, missing_ok: bool = False) -> None:
            if path.name == name:
                calls.append(path.name)
                if len(calls) > limit:
                    raise KeyboardInterrupt
            real_unlink(path, missing_ok)

        monkeypatch.setattr(Path, "replace", renamed)
        monkeypatch.setattr(Path, "unlink", unlinked)
        if change == "remove":
            remove_recorded([file])
        else:
            write_recorded(file.parent, {name: "three\n"})

    for limit in range(10):
        monkeypatch.undo()
        write_recorded(file.parent, {file.name: "one two\n"})
        remove_recorded([file.parent / "more.txt"])
        try:
            kill_at(limit)
            break
        except KeyboardInterrupt:
            monkeypatch.undo()
            path = file.parent / name
            if change == "remove":
                assert has_file(file.parent, name)  # the next process deletes it
            elif has_file(file.parent, name):
                verify(path)
            else:
                assert not path.exists()
    assert limit == (2 if change == "remove" else 3)
    if change != "remove":
        assert read_checksums(file.parent)[name] == checksum(file.parent / name)


def test_what_is_to_go_is_forgotten(file: Path) -> None:
    write_recorded(file.parent, {"more.bin": b"\xff"})
    remove_recorded([file, file.parent / "never.txt"])
    assert not file.exists()
    assert read_checksums(file.parent) == {"more.bin": checksum(file.parent / "more.bin")}
