from __future__ import annotations

import pytest

from discern.config.resolve import InvalidConfigError
from discern.config.schema import expectation
from tests.config.recipe import Oven, cook


def refusal(*overrides: str) -> tuple[str, str | None]:
    """Message and hint of the one problem with these overrides."""
    with pytest.raises(InvalidConfigError) as caught:
        cook(overrides=overrides)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("oven.minuts=3", "unknown key 'minuts' in [oven]", "did you mean 'minutes'?"),
        ("dish.layer=3", "unknown key 'layer' in [dish] with name = 'cake'", "did you mean 'layers'?"),
        ("table.minutes=3", "unknown key 'minutes' in [table]", "did you mean 'oven.minutes'?"),
        ("table.minuts=3", "unknown key 'minuts' in [table]", "did you mean 'oven.minutes'?"),
        ("table.zzz=3", "unknown key 'zzz' in [table]", "known: seats"),
        ("minutes=3", "unknown key 'minutes'", "did you mean 'oven.minutes'?"),
        ("ofen.minutes=3", "unknown section [ofen]", "did you mean 'oven'?"),
        ("xyz.minutes=3", "unknown section [xyz]", "did you mean 'oven.minutes'?"),
        ("xyz.abc=3", "unknown section [xyz]", "known: dish, oven, table"),
        (
            "oven=3",
            "oven is a section, not a value",
            "its keys: temperature, minutes, mode, preheat, light, rest, timer, shelves, heights",
        ),
        ("oven.minutes.x=3", "oven.minutes is a value and has no part 'x'", "set oven.minutes itself"),
    ],
)
def test_an_unknown_key_is_told_with_the_likeliest_one(override: str, message: str, hint: str):
    assert refusal(override) == (f"--set: {message}", hint)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("oven.minutes=many", "oven.minutes is 'many'; expected a whole number of at least 1"),
        ("oven.minutes=1.5", "oven.minutes is 1.5; expected a whole number of at least 1"),
        ("oven.minutes=true", "oven.minutes is true; expected a whole number of at least 1"),
        ("oven.minutes=none", "oven.minutes is 'none'; expected a whole number of at least 1"),
        ("oven.temperature=0", "oven.temperature is 0; expected a number above 0 and of at most 300"),
        ("oven.temperature=nan", "oven.temperature is nan; expected a number above 0 and of at most 300"),
        ("oven.rest=inf", "oven.rest is inf; expected a number above 0 or 'none'"),
        ("oven.rest=-1", "oven.rest is -1; expected a number above 0 or 'none'"),
        ("oven.rest=false", "oven.rest is false; expected a number above 0 or 'none'"),
        ("oven.preheat=2", "oven.preheat is 2; expected true or false"),
        ("oven.light=2", "oven.light is 2; expected true, false or 'auto'"),
        ("oven.mode=3", "oven.mode is 3; expected one of 'fan', 'grill'"),
    ],
)
def test_a_wrong_value_is_told_with_what_was_expected(override: str, message: str):
    found, hint = refusal(override)
    assert found == f"--set: {message}"
    field = Oven.model_fields[override.partition("=")[0].removeprefix("oven.")]
    assert field.description in (hint or "")


def test_a_misspelt_word_names_the_nearest():
    assert refusal("oven.mode=gril")[1] == "did you mean 'grill'?"
    assert refusal("oven.light=AUTO")[1] == "did you mean 'auto'?"


def test_a_wrong_item_of_a_list_is_told_with_the_list():
    message, _ = refusal("oven.shelves=[1, 'two']")
    assert message.startswith("--set: oven.shelves is [1, 'two']; ")


def test_expectations_are_words():
    words = {name: expectation(field) for name, field in Oven.model_fields.items()}
    assert words["minutes"] == "a whole number of at least 1"
    assert words["mode"] == "one of 'fan', 'grill'"
    assert words["rest"] == "a number above 0 or 'none'"
    assert words["light"] == "true, false or 'auto'"
    assert words["shelves"] == "a list"


def test_no_message_mentions_pydantic():
    with pytest.raises(InvalidConfigError) as caught:
        cook(overrides=["oven.minutes=x", "oven.mode=3", "oven.preheat=9", "dish.name=3", "oven.grill=3"])
    assert "pydantic" not in str(caught.value)
    assert "Input should" not in str(caught.value)
