"""The JSON schema by which editors check configuration files."""

from __future__ import annotations

import json
import tomllib

import pytest
from jsonschema import Draft202012Validator

from discern.config.resolve import preset_names
from tests.support import run_discern


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    printed = json.loads(run_discern("config", "schema").stdout)
    Draft202012Validator.check_schema(printed)
    return Draft202012Validator(printed)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_valid(preset: str, schema: Draft202012Validator) -> None:
    schema.validate(tomllib.loads(run_discern("config", "show", "--preset", preset).stdout))


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("extends = 'tiny'\n[objective]\nmask_probability = 0.2\n[train]\nmax_hours = 'none'", True),
        ("[train]\nmax_stepz = 1", False),
        ("[objective]\nname = 'mlm'\ndiscriminator_weight = 1", False),
        ("[model]\nencoder = 'berd'", False),
        ("[train]\nmax_steps = 'none'", False),
    ],
)
def test_what_a_file_may_say(text: str, valid: bool, schema: Draft202012Validator) -> None:
    assert schema.is_valid(tomllib.loads(text)) == valid


def test_settings_are_described(schema: Draft202012Validator) -> None:
    seed = schema.schema["$defs"]["TrainConfig"]["properties"]["seed"]
    assert (seed["default"], seed["minimum"], seed["description"][:4]) == (0, 0, "Seed")
