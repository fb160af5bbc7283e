"""What is peculiar to an architecture is in its folder: other rooms neither name one nor ask for the class of a head."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import discern

SOURCE = Path(discern.__file__).parent
ALLOWED = {"api/use.py", "api/verb.py"}
"""The files that name one: the types of model to export as, and help about what a command takes."""


@pytest.mark.parametrize("architecture", ["modernbert", "xlnet"])
def test_an_architecture_is_one_folder(architecture: str) -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        if architecture not in parts[:-1] and parts[0] != "config" and "permutation" not in path.name:
            code = re.sub(r'"""[\s\S]*?"""|#.*|.*register\(.*', "", path.read_text())
            if architecture in code.lower():
                found.add("/".join(parts))
    assert found <= ALLOWED


def test_only_export_and_onnx_ask_for_the_class_of_a_head() -> None:
    asking = re.compile(r"(isinstance|type)\([^)]*(Head\b|head\) (is|in|not in) .*Head\b)")
    outside = {path.name for path in SOURCE.rglob("*.py") if "models" not in path.parts and asking.search(path.read_text())}
    assert outside <= {"export.py", "onnx.py"}
