"""The program that fits losses against FLOPs, on curves that are known."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from tests.docs.pages import ROOT
from tests.support import run_python

PROGRAM = ROOT / "benchmarks" / "crossing.py"


def write(path: Path, rows: list[tuple[str, float, float]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("objective", "flops", "loss"), *rows])
    return path


def test_known_curves_cross_where_they_do(tmp_path: Path) -> None:
    # 0.5 + x^-0.5 is below 0.6 + 0.8 x^-0.5 where 0.2 x^-0.5 < 0.1: from four times the first size on.
    sizes = np.array([1e13, 1.5e13, 3e13])
    rows = [("rtd", size, 0.5 + (size / 1e13) ** -0.5) for size in sizes]
    rows += [("mlm", size, 0.6 + 0.8 * (size / 1e13) ** -0.5) for size in sizes]
    rows.append(("mlm", 1e13, rows[3][2]))  # a second seed with the same loss: no noise
    found = run_python(PROGRAM, write(tmp_path / "losses.csv", rows), "--draws", "10").stdout
    assert "| rtd | 0.500 | 0.50 | 1.000 |" in found
    assert "| mlm | 0.600 | 0.50 | 0.800 |" in found
    crossing = float(found.split("rtd is below mlm from ")[1].split()[0])
    assert crossing == pytest.approx(4e13, rel=0.02)
    assert "in 0% of them" in found


def test_two_sizes_are_no_curve(tmp_path: Path) -> None:
    path = write(tmp_path / "losses.csv", [("mlm", 1e13, 2.0), ("mlm", 2e13, 1.0)])
    refused = run_python(PROGRAM, path)
    assert refused.returncode == 1
    assert "mlm has runs of 2 sizes; a curve needs three" in refused.stderr
