"""The bands of a piece by slices: what a task reads, and how damage is noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from discern.data.curation.near_duplicates import HASHES, Banding
from discern.data.stages.results import result_folder
from discern.data.stages.signatures import checked_rows, read_signatures, read_slice, with_checks, write_bands
from discern.errors import DataError

BANDING = Banding.of(0.8)
DOCUMENTS = 1000


@pytest.fixture
def piece(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """The folder of a piece, and the signatures of its documents: every third a copy, and one without words."""
    drawn = np.random.default_rng(0).integers(0, 1 << 32, (DOCUMENTS, HASHES), dtype=np.uint32)
    drawn[2::3] = drawn[: len(drawn[2::3])]
    drawn[7] = 0xFFFFFFFF
    with result_folder(tmp_path / "piece") as aside:
        aside.write("signatures", with_checks(drawn))
        write_bands(aside.path, drawn, BANDING)
    return tmp_path / "piece", drawn


@pytest.mark.parametrize("parts", [1, 4, 16])
def test_the_slices_of_a_band_are_the_band(piece: tuple[Path, np.ndarray], parts: int) -> None:
    folder, signatures = piece
    for band in (0, 7, BANDING.bands - 1):
        expected = BANDING.keys(signatures, band)
        slices = [read_slice(folder, band, part, parts) for part in range(parts)]
        keys, documents = (np.concatenate(each) for each in zip(*slices, strict=True))
        assert len(keys) == DOCUMENTS - 1
        assert (np.diff(keys.astype(object)) >= 0).all()
        np.testing.assert_array_equal(expected[documents], keys)
        assert sorted(documents) == [number for number in range(DOCUMENTS) if number != 7]
        same = keys[1:] == keys[:-1]
        assert same.sum() > 200
        assert (np.diff(documents)[same] > 0).all()
        assert all(len(found) > DOCUMENTS // parts // 2 for found, _ in slices)


def test_a_task_reads_and_checks_its_band_only(piece: tuple[Path, np.ndarray]) -> None:
    folder, _ = piece
    content = bytearray((folder / "band-03").read_bytes())
    content[0] ^= 1
    (folder / "band-03").write_bytes(content)
    with pytest.raises(DataError, match="band-03 is damaged") as raised:
        read_slice(folder, 3, 0, 8)
    assert "run the same command again" in str(raised.value.hint)
    read_slice(folder, 2, 7, 8)
    read_slice(folder, 4, 0, 8)


def test_a_file_that_is_cut_short_or_missing(piece: tuple[Path, np.ndarray]) -> None:
    folder, _ = piece
    content = (folder / "band-00").read_bytes()
    (folder / "band-00").write_bytes(content[:-1])
    with pytest.raises(DataError, match="band-00 is damaged"):
        read_slice(folder, 0, 0, 1)
    (folder / "band-00").unlink()
    with pytest.raises(DataError, match="band-00 cannot be read"):
        read_slice(folder, 0, 0, 1)
    (folder / "signatures").write_bytes(b"short")
    with pytest.raises(DataError, match="signatures is cut short or missing"):
        read_signatures(folder, DOCUMENTS)


def test_the_rows_that_are_used_are_checked(piece: tuple[Path, np.ndarray]) -> None:
    folder, signatures = piece
    chosen = np.array([5, 5, 900])
    np.testing.assert_array_equal(checked_rows(folder, read_signatures(folder, DOCUMENTS)[chosen]), signatures[chosen])
    damaged = np.array(read_signatures(folder, DOCUMENTS))
    damaged[900, 64] ^= 1 << 31
    damaged[901] = 0
    damaged[902] = 0xFFFFFFFF
    for row in (900, 901, 902):
        with pytest.raises(DataError, match="signatures is damaged"):
            checked_rows(folder, damaged[[5, row]])
    checked_rows(folder, damaged[[5, 7]])
