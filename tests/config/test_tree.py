from __future__ import annotations

import tomllib
from pathlib import Path

from discern.config.schema import ABSENT, diff, flatten, nest, to_toml, toml_value
from tests.config.recipe import cook, cook_file


def test_flatten_and_nest_are_inverse():
    flat = flatten(cook().config)
    assert flat["oven.minutes"] == 20
    assert flat["dish.layers"] == 2
    assert flatten(cook().config) == {f"{a}.{b}": value for a, table in nest(flat).items() for b, value in table.items()}


def test_toml_is_complete_and_reads_back_the_same(tmp_path: Path):
    config = cook(overrides=["oven.timer=none", "oven.temperature=1e-12", "oven.shelves=[3, 1]", "dish.layers=7"]).config
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    again = cook_file(path)
    assert again.config == config
    assert type(again.config.dish) is type(config.dish)
    assert again.config.oven.timer is None
    written = tomllib.loads(to_toml(config))
    assert "rest" not in written["oven"]  # none is its default
    assert written["oven"]["timer"] == "none"
    assert {key for key, value in flatten(config).items() if value is not None} <= again.user_set


def test_toml_is_the_same_each_time():
    assert to_toml(cook().config) == to_toml(cook().config)


def test_values_stand_on_one_line():
    assert toml_value([1, 2]) == "[ 1, 2, ]"
    assert toml_value('say "x"\n') == r'"say \"x\"\n"'
    assert toml_value(1e-6) == "1e-06"


def test_differences_name_what_only_one_side_has():
    found = diff(cook(overrides=["oven.minutes=3"]).config, cook(overrides=["dish.name=soup"]).config)
    assert found == [
        ("oven.minutes", 3, 20),
        ("dish.name", "cake", "soup"),
        ("dish.layers", 2, ABSENT),
        ("dish.litres", ABSENT, 1.0),
    ]
    assert diff(cook().config, cook().config) == []
