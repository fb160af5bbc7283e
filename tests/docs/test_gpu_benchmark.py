"""The report of benchmarks/gpu.sh: what a section that fails leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_section_that_fails_leaves_its_traceback_and_the_others(tmp_path: Path) -> None:
    command = ["sh", "benchmarks/gpu.sh", str(tmp_path), "--small", "--minutes", "4", "--sections", "peers", "techniques"]
    environment = os.environ | {"PYTHON": sys.executable, "GPU_FAIL": "techniques", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    sections = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert "problem" not in sections["peers"]
    assert {each["peer"] for each in sections["peers"]["results"]} == {"electra", "modernbert"}
    assert "RuntimeError" in sections["techniques"]["traceback"]
    page = (tmp_path / "gpu.md").read_text()
    assert "Traceback" in page
    assert "| electra | 8 | 64 | no |" in page
