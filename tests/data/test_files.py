"""Where results may be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.data.files import check_output
from discern.errors import ConfigError


def test_the_output_is_neither_a_folder_nor_the_input(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    check_output("--out", None, "found.jsonl", tmp_path / "a")
    check_output("--out", tmp_path / "b", "found.jsonl", tmp_path / "a", None)
    check_output("--out", tmp_path / "a", "found.jsonl", Path("-"))
    with pytest.raises(ConfigError, match=r"is a folder\n.*--html .*/page\.html"):
        check_output("--html", tmp_path, "page.html", tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="is the input"):
        check_output("--out", tmp_path / "a", "found.jsonl", None, tmp_path / "link")
