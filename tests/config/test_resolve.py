from __future__ import annotations

from pathlib import Path

import pytest

from discern.config.resolve import InvalidConfigError
from discern.config.schema import flatten
from tests.config.recipe import Cake, Soup, cook, cook_file, from_preset


def test_defaults_presets_and_overrides_give_one_validated_configuration():
    resolved = cook({"dish.name": "cake", "oven.minutes": 30}, ["dish.layers=5"])
    assert isinstance(resolved.config.dish, Cake)
    assert (resolved.config.oven.minutes, resolved.config.dish.layers, resolved.config.oven.temperature) == (30, 5, 180.0)
    assert resolved.origins["oven.minutes"] == "preset sunday"
    assert resolved.origins["dish.layers"] == "--set"
    assert resolved.origins["oven.temperature"] == "default"
    assert resolved.user_set == {"dish.layers"}
    assert resolved.dropped == []


def test_every_leaf_has_an_origin():
    resolved = cook()
    assert resolved.origins.keys() == flatten(resolved.config).keys()


def test_text_and_whole_floats_become_numbers():
    oven = cook(
        overrides=["oven.minutes=4e1", "oven.temperature='99.5'", "oven.preheat=False", "oven.shelves=[1, 2]"]
    ).config.oven
    assert (oven.minutes, oven.temperature, oven.preheat, oven.shelves) == (40, 99.5, False, [1, 2])


def test_none_empties_an_optional_value():
    oven = cook({"dish.name": "cake", "oven.rest": 3.0}, ["oven.rest=none", "oven.timer=none"]).config.oven
    assert oven.rest is None
    assert oven.timer is None


def test_another_variant_drops_what_the_preset_meant_for_the_first():
    resolved = cook({"dish.name": "cake", "dish.layers": 3, "dish.servings": 2}, ["dish.name=soup"])
    assert isinstance(resolved.config.dish, Soup)
    assert resolved.config.dish.servings == 2
    assert [(item.key, item.value, item.origin) for item in resolved.dropped] == [("dish.layers", 3, "preset sunday")]
    assert "name = 'soup'" in resolved.dropped[0].reason
    assert "dish.layers" not in resolved.origins


def test_another_variant_keeps_the_user_to_his_word():
    with pytest.raises(InvalidConfigError, match=r"unknown key 'layers' in \[dish\] with name = 'soup'"):
        cook(overrides=["dish.name=soup", "dish.layers=3"])


def test_another_variant_keeps_files_strict(tmp_path: Path):
    (tmp_path / "cake.toml").write_text('[dish]\nname = "cake"\nlayers = 3\n')
    with pytest.raises(InvalidConfigError, match=r"cake\.toml, line 3: unknown key 'layers'"):
        cook_file(tmp_path / "cake.toml", ["dish.name=soup"])


def test_a_preset_that_contradicts_itself_is_wrong():
    with pytest.raises(InvalidConfigError, match="unknown key 'layers'"):
        cook({"dish.name": "soup", "dish.layers": 3})
    with pytest.raises(InvalidConfigError, match="unknown key 'minuts'"):
        cook({"dish.name": "soup", "oven.minuts": 3})


def test_a_value_the_user_left_alone_is_lowered():
    by_default = cook(overrides=["table.seats=3"])
    assert by_default.config.dish.servings == 3
    assert by_default.origins["dish.servings"] == "default, at most table.seats"
    by_preset = cook({"dish.name": "cake", "dish.servings": 8})
    assert by_preset.config.dish.servings == 6
    assert by_preset.origins["dish.servings"] == "preset sunday, at most table.seats"
    assert isinstance(by_preset.config.dish, Cake)


def test_a_value_the_user_set_is_refused_with_both_numbers_and_what_to_type():
    with pytest.raises(InvalidConfigError, match=r"--set: dish\.servings is 9, beyond table\.seats, which is 6") as caught:
        cook(overrides=["dish.servings=9"])
    assert caught.value.hint == "--set table.seats=9"


def test_every_problem_is_told_at_once():
    with pytest.raises(InvalidConfigError) as caught:
        cook(
            {"dish.name": "cake"},
            ["oven.minuts=3", "oven.mode=grll", "dish.layers=0", "tabel.seats=1", "seats=3", "oven.preheat=7", "dish=1"],
        )
    assert {problem.key for problem in caught.value.problems} == {
        "oven.minuts",
        "oven.mode",
        "dish.layers",
        "tabel.seats",
        "seats",
        "oven.preheat",
        "dish",
    }
    assert caught.value.message.startswith("7 problems")
    assert caught.value.exit_code == 2


def test_a_wrong_variant_is_a_problem_among_others():
    with pytest.raises(InvalidConfigError) as caught:
        cook({"dish.name": "cake", "dish.layers": 3}, ["dish.name=soop", "oven.minutes=0"])
    assert [problem.text for problem in caught.value.problems] == [
        "--set: unknown dish 'soop'",
        "--set: oven.minutes is 0; expected a whole number of at least 1",
    ]
    assert caught.value.problems[0].hint == "did you mean 'soup'?"


@pytest.mark.parametrize(("overrides", "says"), [([], "dish.name is missing"), (["dish.name=5"], "--set: dish.name is 5")])
def test_a_missing_variant_lists_the_known_ones(overrides: list[str], says: str):
    with pytest.raises(InvalidConfigError) as caught:
        cook({}, overrides)
    assert caught.value.message == f"{says}; expected one of 'cake', 'soup'"


def test_rules_between_fields_and_between_sections():
    with pytest.raises(InvalidConfigError) as caught:
        cook({"dish.name": "cake", "oven.minutes": 90}, ["oven.mode=grill"])
    assert caught.value.message == ("[oven] minutes 90 is too long for mode grill (minutes: preset sunday, mode: --set)")
    with pytest.raises(InvalidConfigError, match=r"dish\.name soup cannot stand under oven\.mode grill \(.*oven\.mode: --set"):
        cook({"dish.name": "soup"}, ["oven.mode=grill"])


def test_settings_are_not_edited():
    settings = from_preset({"dish.name": "cake", "dish.layers": 3})
    before = dict(settings)
    cook({key: setting.value for key, setting in settings.items()}, ["dish.name=soup"])
    assert settings == before
