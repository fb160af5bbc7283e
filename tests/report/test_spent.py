"""What a run has cost: hours, money and energy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from discern.report.run_page import report, spent
from discern.training.device import energy
from tests.small.run import make_run

CPU = torch.device("cpu")
LINE = {"step": 1, "tokens": 50, "seconds": 5400.0, "peak_memory_bytes": 2**30}


def test_joules_of_counters_that_wrap_around(tmp_path: Path) -> None:
    for number, name, microjoules in ((0, "package-0", 9e6), (1, "package-1", 2e6), (2, "psys", 1e6)):
        domain = tmp_path / f"intel-rapl:{number}"
        domain.mkdir()
        for file, content in (("name", name), ("energy_uj", int(microjoules)), ("max_energy_range_uj", 10_000_000)):
            (domain / file).write_text(f"{content}\n")
    meter = energy(CPU, tmp_path)
    assert next(meter) == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("1000000")  # from 9 J to 10, and 1 more
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("5000000")
    (tmp_path / "intel-rapl:2" / "energy_uj").write_text("7000000")  # includes the packages
    assert next(meter) == pytest.approx(2 + 3)
    assert next(meter) == pytest.approx(2 + 3)


def test_a_machine_that_does_not_tell(tmp_path: Path) -> None:
    assert next(energy(CPU, tmp_path)) != next(energy(CPU, tmp_path)), "not a number"


def test_hours_cost_and_energy_of_a_run(tmp_path: Path) -> None:
    assert spent(tmp_path) == {}
    make_run(tmp_path / "plain", metrics=[LINE])
    assert spent(tmp_path / "plain") == {"hours": 1.5}
    make_run(tmp_path / "run", overrides=["train.price_per_hour=2"], metrics=[LINE | {"energy_joules": 7.2e6}])
    assert spent(tmp_path / "run") == {"hours": 1.5, "cost": 3.0, "energy_joules": 7.2e6}
    html = report(tmp_path / "run", None).read_text(encoding="utf-8")
    assert "3.00" in html
    assert "2.000 kWh" in html
