from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy
import pytest
import torch

from discern.cli.console import jsonable
from discern.config.schema import Section


class Color(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Point:
    x: float
    name: str | None = None


class Model(Section):
    a: int = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        (numpy.float32("nan"), None),
        (numpy.float64(0.5), 0.5),
        (numpy.int64(3), 3),
        (numpy.bool_(True), True),
        (numpy.array([1.0, float("inf")]), [1.0, None]),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([1, 2]), [1, 2]),
        (Path("a/b"), "a/b"),
        (Color.RED, "red"),
        (Point(1.0), {"x": 1.0, "name": None}),
        (Model(), {"a": 1}),
        ({1: (2, {3})}, {"1": [2, [3]]}),
        (True, True),
        ("text", "text"),
        (b"bytes", "bytes"),
        (float, "<class 'float'>"),
    ],
)
def test_values_become_json(value: object, expected: object):
    found = jsonable({"value": value})["value"]
    assert found == expected
    assert type(found) is type(expected)
    assert json.loads(json.dumps(found, allow_nan=False)) == expected
