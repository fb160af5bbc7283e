"""Mixtures: which source a row comes from, how many, and that any place is reached by itself."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from discern.config.schema import ScheduleSegment
from discern.data.batching.mixture import HeldoutMixture, MixedStream, parse_sources, source_names
from discern.data.batching.rows import scheduled_rows, training_rows
from discern.data.config import DataConfig
from discern.errors import ConfigError
from discern.types import TokenBatch
from tests.support import SPECIAL, MemorySplit


def split_of(source: int, length: int) -> MemorySplit:
    """Documents of one length, so that rows of packing 'segments' are full or nearly empty; their ids tell the source."""
    ids = count(10_000 * (source + 1))
    return MemorySplit([[[next(ids) for _ in range(length)]] for _ in range(60)])


SPLITS = [split_of(source, length) for source, length in enumerate((29, 5, 12))]
PACKED = DataConfig(sequence_length=32, packing="packed")


def mixed(config: DataConfig, *segments: ScheduleSegment) -> MixedStream:
    splits = SPLITS[: len(segments[0].weights) or 3]
    return scheduled_rows(splits, SPECIAL, config, 0, segments, in_slots=False)


def read(rows: MixedStream, start: int, stop: int) -> tuple[TokenBatch, np.ndarray]:
    """A batch, and the source of each of its rows."""
    batch = rows.batch(np.arange(start, stop), np.arange(stop - start))
    return batch, batch.input_ids.amax(1).numpy() // 10_000 - 1


@pytest.mark.parametrize("weights", [(0.7, 0.3, 0), (1, 1, 2), (0.8, 0.15, 0.05), (0.001, 0.999, 0), ()])
@pytest.mark.parametrize("packing", ["packed", "segments"])
def test_each_source_has_its_share_of_the_tokens_everywhere(weights: tuple[float, ...], packing: str) -> None:
    config = DataConfig(sequence_length=32, packing=packing, short_sequence_probability=0, mixture_temperature=2)
    batch, sources = read(mixed(config, ScheduleSegment(0, 4, 32, weights=weights)), 0, 4000)
    expected = np.array(weights or np.sqrt([29, 5, 12]))  # without weights, the temperature and the sizes decide
    tokens = (~batch.special_tokens_mask).sum(1).numpy()
    for begin in (0, 2000):  # the sources are spread evenly
        held = np.bincount(sources[begin : begin + 2000], tokens[begin : begin + 2000], minlength=3)
        assert held / held.sum() == pytest.approx(expected / expected.sum(), abs=0.004)


@pytest.mark.parametrize("packing", ["packed", "two-part"])
def test_a_source_is_read_in_its_own_order_and_any_batch_is_found_alone(packing: str) -> None:
    config, segment = DataConfig(sequence_length=32, packing=packing), ScheduleSegment(0, 4, 32, weights=(3, 2, 5))
    whole, sources = read(mixed(config, segment), 0, 200)
    for source, split in enumerate(SPLITS):
        chosen = np.flatnonzero(sources == source)
        own = training_rows(split, SPECIAL, config, 0).batch(np.arange(len(chosen)), chosen)
        assert torch.equal(whole.input_ids[chosen], own.input_ids)
    chosen = np.array([173, 2, 90, 91])
    part = mixed(config, segment).batch(chosen, chosen)
    for name in ("input_ids", "attention_mask", "position_ids", "word_starts", "example_index"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[chosen]), name


def test_another_mixture_and_another_length_continue_where_each_source_was() -> None:
    segments = [ScheduleSegment(0, 5, 32, 0, weights=(1, 1)), ScheduleSegment(4, 5, 32, 20, weights=(1, 4))]
    rows = mixed(PACKED, *segments, ScheduleSegment(8, 10, 16, 40, weights=(1, 4)))
    begins, (batch, sources) = np.bincount(read(rows, 0, 20)[1]), read(rows, 20, 40)
    numbers = np.bincount(sources)
    assert numbers[0] < begins[0]
    for source, split in enumerate(SPLITS[:2]):
        places = begins[source] + np.arange(numbers[source])
        own = training_rows(split, SPECIAL, PACKED, 0).batch(places, places)
        assert torch.equal(batch.input_ids[sources == source], own.input_ids)
    sizes = [[stream.num_rows for stream in streams] for streams in rows.streams]
    assert rows.epochs(40) == pytest.approx((begins + numbers) / sizes[0])
    later = np.bincount(read(rows, 40, 140)[1]) / sizes[2]
    assert rows.epochs(140) == pytest.approx((begins + numbers) / sizes[0] + later)
    assert read(rows, 40, 50)[0].input_ids.shape == (10, 16)


def test_metrics_of_a_mixture_are_weighted_means() -> None:
    rows = {name: training_rows(split, SPECIAL, PACKED, 0) for name, split in zip("ab", SPLITS, strict=False)}
    for weights, loss in (({"a": 0.75, "b": 0.25}, 1.25), ({"a": 1.0, "b": 0.0}, 1.0)):
        assert HeldoutMixture(rows, weights).mean([{"loss": 1.0}, {"loss": 2.0}]) == {"loss": pytest.approx(loss)}


def test_names_are_as_short_as_they_can_be() -> None:
    assert source_names(["/data/wiki", "s3://bucket/news"]) == ["wiki", "news"]
    assert source_names(["/a/en/data", "/b/en/data"]) == ["/a/en/data", "/b/en/data"]


def test_weights_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t=0.5").mkdir()
    assert parse_sources(["A=0.7", "s3://b/c=3e-1"]) == {"A": 0.7, "s3://b/c": 0.3}
    assert parse_sources(plain := ["t=0.5", "a=b", "https://host/data?version=3"]) == plain
    for wrong in (["A=0.7", "B"], ["A=1", "B=0"], ["A=-1", "B=2"], ["A=1", "A=2"]):
        with pytest.raises(ConfigError, match="expected different data sets, and a weight above 0 for all or none"):
            parse_sources(wrong)


@pytest.mark.parametrize("mixture", [((0, (1, 1)), (0.5, (1,))), ((0, (0, 0)),), ((0, (-1, 2)),), ((5, (1, 1)),)])
def test_mixtures_that_cannot_be_are_refused(mixture: Any) -> None:
    with pytest.raises(ValueError, match="mixture"):
        DataConfig(mixture=mixture)
