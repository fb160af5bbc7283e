import os
import subprocess
import sys

import pytest

import discern


@pytest.mark.parametrize("name", discern.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(discern, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="pretrian"):
        discern.pretrian  # noqa: B018


@pytest.mark.parametrize(
    ("loaded", "given", "counts", "warns"),
    [
        (False, {}, "1000", False),
        (True, {}, "1000", True),
        (True, {"GOMP_SPINCOUNT": "5"}, "5", False),
        (True, {"OMP_WAIT_POLICY": "active"}, "None", False),
    ],
)
def test_threads_of_torch_do_not_spin_and_importing_discern_does_not_import_it(
    loaded: bool, given: dict[str, str], counts: str, warns: bool
) -> None:
    before = "sys.modules['torch'] = sys" if loaded else "pass"
    names = "discern, discern.config.resolve, discern.registry, discern.cli.main"
    program = (
        f"import os, sys; {before}; import {names}; print(os.environ.get('GOMP_SPINCOUNT'), sys.modules.get('torch') is sys)"
    )
    usual = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=usual | given)
    assert ended.stdout.split() == [counts, str(loaded)]
    assert ended.stderr.count("torch was imported before discern") == warns
