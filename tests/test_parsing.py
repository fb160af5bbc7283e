"""Whatever is wrong with JSON or TOML is one exception, and soon."""

from __future__ import annotations

import json
import time
import tomllib
from pathlib import Path

import pytest

from discern.errors import ConfigError
from discern.parsing import json_value, toml_tables
from discern.training.config import load_pretrain_config

SECONDS = 20
"""On a machine that is busy with other things; what is refused here took minutes."""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 5000, "more than 4300 digits"),
        ('{"a": ', "Expecting value"),
    ],
)
def test_json(text: str, says: str) -> None:
    for given in (text, text.encode()):
        with pytest.raises(json.JSONDecodeError, match=says):
            json_value(given)
    assert json_value('{"a": [1, "\\u001b"]}') == {"a": [1, "\x1b"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = " + "[" * 100_000, "nested too deeply"),
        ("a = " + "{a=" * 50_000, "nested too deeply"),
        ("a." * 50_000 + "a = 1", "more than 100 parts"),
        ("[" + "a . " * 50_000 + "a]", "more than 100 parts"),
        ("a = " + "9" * 5000, "more than 4300 digits"),
        ("a = ", "Invalid value"),
    ],
)
def test_toml(text: str, says: str) -> None:
    began = time.monotonic()
    with pytest.raises(tomllib.TOMLDecodeError, match=says):
        toml_tables(text)
    assert time.monotonic() - began < SECONDS


def test_long_words_are_no_long_keys() -> None:
    began = time.monotonic()
    assert toml_tables(f'a = "{"x" * 1_000_000}"\nb.c = {"9" * 15}\n')["b"]["c"] == int("9" * 15)
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.num_layers=1000000000", "model.num_layers is 1000000000; expected a whole number from 1 to 1,024"),
        ("model.hidden_size=1e9", "model.hidden_size is 1000000000.0; expected"),
        ("data.sequence_length=1000000000000", "data.sequence_length is 1000000000000; expected"),
        ("train.sequences_per_step=1000000000", "train.sequences_per_step is 1000000000; expected"),
        (f"train.seed={'9' * 60}", "expected a number of at most 64 bits"),
        (f"train.seed={'9' * 5000}", r"train.seed is '9{199}\.\.\.; expected"),
        (f"optimizer.learning_rate={'9' * 400}", r"is 9{200}\.\.\.; expected"),
        (f"train.seed={'[' * 50_000}", r"\[\.\.\.; expected a whole number"),
        ("train=" + "{a=" * 300 + "1" + "}" * 300, r"unknown key 'a' in \[train\.a\.a.{,250}\]"),
        ("a." * 50_000 + "a=1", r"unknown key 'a' in \[a\.a.{,250}\]"),
        ("x" * 100_000 + "=1", r"unknown key .{,250}\n"),
        ("x" * 100_000, "^--set x{200}: expected"),
    ],
)
def test_settings_beyond_reason_are_refused_at_once(override: str, says: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=says) as caught:
        load_pretrain_config(None, "tiny", [override])
    assert time.monotonic() - began < SECONDS
    assert len(caught.value.message) < 1000


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('extends = "tiny"\n[train]\nmax_steps = 7\n', encoding="utf-8-sig")
    assert load_pretrain_config(tmp_path / "run.toml", None, []).config.train.max_steps == 7
