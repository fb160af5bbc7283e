"""Checksums: what is written beside files is compared when they are read, and a large file is hashed once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from discern.errors import CheckpointError, DataError
from discern.kernels.build import private_folders
from discern.storage import checksums
from discern.storage.checksums import (
    CHECKSUMS_NAME,
    VARIABLE,
    cached_checksum,
    checksum,
    has_file,
    make_cache_folder,
    read_checksums,
    record_checksums,
    remove_recorded,
    update_checksums,
    verify,
    write_recorded,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "words.txt"
    path.parent.mkdir()
    path.write_text("one two\n")
    record_checksums(path.parent, ["words.txt"])
    return path


def test_a_changed_file_is_named_with_what_to_type(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify(file)
    verify(file, b"one two\n")
    (file.parent / "else.txt").write_text("has no checksum")
    verify(file.parent / "else.txt")
    file.write_text("one twi\n")
    with pytest.raises(CheckpointError, match=r"words\.txt is damaged or was edited: its SHA-256 is \w{12}\.\.\.") as caught:
        verify(file, error=CheckpointError)
    assert str(caught.value.hint).endswith(f"discern doctor --accept {file.parent}")
    with pytest.raises(DataError):
        verify(file, b"one twi\n")
    monkeypatch.setenv(VARIABLE, "0")
    verify(file)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": "b"}', "\x00\xff", "[" * 100_000])
def test_a_damaged_list_is_no_reason_to_trust(content: str, file: Path) -> None:
    (file.parent / CHECKSUMS_NAME).write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"checksums\.json is damaged"):
        verify(file)
    update_checksums(file.parent, {"words.txt": checksum(file)}, new=True)
    verify(file)


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
    digests = {cached_checksum(path) for _ in range(3)}
    assert (len(digests), len(hashed)) == (1, 1)

    times = path.stat()
    path.write_bytes(b"y" * 99)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the size and the time of modification are as they were
    assert cached_checksum(path) not in digests
    for note in (tmp_path / "cache" / "verified").iterdir():
        note.write_text("damaged")
    assert cached_checksum(path) not in digests
    assert len(hashed) == 3


@pytest.mark.skipif(os.name != "posix", reason="umask")
def test_the_cache_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes it first: kernels are loaded from no folder that others may write to, and umask 002 lets a group write."""
    monkeypatch.setenv("DISCERN_CACHE", str(tmp_path / "new" / "cache"))
    before = os.umask(0o002)
    try:
        assert make_cache_folder("verified").is_dir()
    finally:
        os.umask(before)
    assert next(private_folders()) == tmp_path / "new" / "cache"


@pytest.mark.parametrize("change", ["replace", "add", "remove"])
def test_wherever_a_process_is_killed_the_folder_is_as_before_or_after(
    change: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a run goes on with more steps, and its config.toml is written anew."""
    path = file.parent / ("more.txt" if change == "add" else file.name)
    calls: list[str] = []

    def killed_at(limit: int, method: str, concerns: tuple[str, ...]) -> None:
        real = getattr(Path, method)

        def wrapped(self: Path, *arguments: Path, **options: bool) -> object:
            if Path(arguments[0] if arguments else self).name in concerns:
                calls.append(method)
                if len(calls) > limit:
                    raise KeyboardInterrupt
            return real(self, *arguments, **options)

        monkeypatch.setattr(Path, method, wrapped)

    for limit in range(4):
        write_recorded(file.parent, {file.name: "one two\n"})
        remove_recorded([file.parent / "more.txt"])
        calls.clear()
        killed_at(limit, "replace", (path.name, CHECKSUMS_NAME))
        killed_at(limit, "unlink", (path.name,))
        try:
            if change == "remove":
                remove_recorded([path, path.with_name("never.txt")])
            else:
                write_recorded(path.parent, {path.name: "three\n"})
            monkeypatch.undo()
            break
        except KeyboardInterrupt:
            monkeypatch.undo()
            if change == "remove":
                assert has_file(file.parent, path.name)  # the next process deletes it
            elif has_file(file.parent, path.name):
                verify(path)
            else:
                assert not path.exists()
    assert limit == (2 if change == "remove" else 3)
    assert read_checksums(file.parent).get(path.name) == (None if change == "remove" else checksum(path))
