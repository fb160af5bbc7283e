"""Running a test on the kernels or without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from discern import kernels


def on_path(name: str) -> Iterator[None]:
    """For a fixture: what runs meanwhile takes that path, 'kernels' or 'plain'."""
    if name == "kernels":
        found = kernels.load_kernels()
        if found.library is None:
            pytest.skip(f"no kernels: {found.reason}")
        yield
        return
    with kernels.switched_off():
        yield
