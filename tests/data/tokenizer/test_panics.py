"""What the tokenizers library says in Rust is said in words that name the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from discern.data.tokenizer import load_tokenizer, naming_panics
from discern.data.tokenizer.encoding import DocumentEncoder
from discern.errors import DataError
from tests.cli.test_console import leave
from tests.small.tokenizers import small_tokenizer


def with_part(tmp_path: Path, **parts: object) -> Path:
    """A sound tokenizer.json but for these parts of it."""
    whole = json.loads(small_tokenizer("wordpiece, lower-cased").to_str())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(whole | parts))
    return path


def test_a_table_that_makes_the_library_panic(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = with_part(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(DataError, match=f"{path}: the tokenizers library cannot use it: .*precompiled_charsmap"):
        load_tokenizer(path)
    assert capfd.readouterr().err == ""  # no backtrace
    os.write(2, b"still there")
    assert capfd.readouterr().err == "still there"


def test_a_pattern_that_is_none(tmp_path: Path) -> None:
    path = with_part(
        tmp_path, pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    )
    with pytest.raises(DataError, match=r"is not a tokenizer\.json: .*unmatched parenthesis"):
        load_tokenizer(path)


def test_a_pattern_that_takes_forever(tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": r"(a+)+\1$"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_tokenizer(with_part(tmp_path, pre_tokenizer=pattern))
    text = "a" * 40 + "b"
    with pytest.raises(DataError, match=r"the tokenizers library cannot use it: .*retry-limit"):
        DocumentEncoder(tokenizer.to_str(), "none").encode([[text]])
    with pytest.raises(BaseException, match="retry-limit") as panic:  # of a class that cannot be imported
        tokenizer.encode(text)
    assert leave(panic.value) == 1


def test_other_errors_pass() -> None:
    with pytest.raises(KeyboardInterrupt), naming_panics("x"):
        raise KeyboardInterrupt
