"""Values that annotations do not list are refused."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import pytest

import discern
from discern.api.arguments import checks_choices, python_errors
from discern.wording import in_python

Fruit: TypeAlias = Literal["apple", "pear"]


@checks_choices
def eat(first: Fruit, *, then: Fruit | None = None, most: int = 1, others: Sequence[Fruit] = (), name: str = "") -> str:
    """Eat some fruit."""
    return f"{first} {then} {most} {list(others)} {name}"


def test_listed_values_and_all_others_pass() -> None:
    assert eat("apple") == "apple None 1 [] "
    assert eat(first="pear", then="apple", most=2, others=["apple"], name="x") == "pear apple 2 ['apple'] x"
    assert (eat.__name__, eat.__doc__) == ("eat", "Eat some fruit.")
    assert list(inspect.signature(eat).parameters) == ["first", "then", "most", "others", "name"]


def test_other_values_are_refused_by_position_and_by_name() -> None:
    with pytest.raises(discern.ConfigError, match="first is 'appel', expected one of 'apple', 'pear'") as raised:
        eat("appel")  # type: ignore[arg-type]
    assert raised.value.hint == "did you mean 'apple'?"
    with pytest.raises(discern.ConfigError, match="then is 'stone'") as raised:
        eat("pear", then="stone")  # type: ignore[arg-type]
    assert raised.value.hint == "known: apple, pear"


def test_wrong_calls_are_errors_as_ever() -> None:
    with pytest.raises(TypeError, match=r"eat\(\) missing 1 required positional argument: 'first'"):
        eat()  # type: ignore[call-arg]


@checks_choices
def drink(what: Fruit | Literal["water"] | None = None, where: Fruit | Path = "apple") -> str:
    return f"{what} {where}"


def test_unions_have_the_values_of_all_their_parts() -> None:
    assert [drink("water"), drink("pear"), drink()] == ["water apple", "pear apple", "None apple"]
    assert drink(where=Path("a")) == "None a"
    with pytest.raises(discern.ConfigError, match="what is 'wine'"):
        drink("wine")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("--sequences is -3", "sequences is -3"),
        ("--set: unknown key 'x' in [train]", "settings: unknown key 'x' in [train]"),
        (
            "--set train.max_steps=10, or --set train.compile=true",
            'settings={"train.max_steps": 10}, or settings={"train.compile": True}',
        ),
        ("--set 'data.length_schedule=[[0, 1], [9, 2]]' or", 'settings={"data.length_schedule": [[0, 1], [9, 2]]} or'),
        (
            "--set train.parallel=ddp (--set optimizer.learning_rate=...)",
            'settings={"train.parallel": "ddp"} (settings={"optimizer.learning_rate": ...})',
        ),
        ("give a dev file: --dev FILE", "give a dev file: eval_set=FILE"),
        ("choose another --batch-size", "choose another batch_size"),
        ("run `discern export --out DIR`; --as bert", "run `discern export --out DIR`; form bert"),
        (
            "prepare it again: discern prepare TEXT --out DATA; or leave out --data",
            "prepare it again: discern prepare TEXT --out DATA; or leave out data",
        ),
    ],
)
def test_errors_name_parameters_instead_of_options(said: str, expected: str) -> None:
    with pytest.raises(discern.DataError) as raised, python_errors(lambda text: in_python(text, {"dev": "eval_set"})):
        raise discern.DataError(said, hint=said)
    assert (raised.value.message, raised.value.hint) == (expected, expected)
