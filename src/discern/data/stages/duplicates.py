"""The stages of near-duplicates: signatures (with the pieces), links of each band, clusters. Each result is a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Int

from discern.data.curation.near_duplicates import HASHES, NGRAM_WORDS, Banding, find_near_duplicates, links_of_band
from discern.data.dataset.manifest import NearDuplicates
from discern.data.stages.pieces import Pieces
from discern.data.stages.plan import PrepareJob
from discern.data.stages.results import Aside, read_array, result_of, values_of


def num_buckets(job: PrepareJob) -> int:
    """Number of tasks of the buckets: one for each band."""
    assert job.plan.build.near_duplicates is not None
    return Banding.of(job.plan.build.near_duplicates).bands


def _signatures(job: PrepareJob) -> list[np.ndarray]:
    return [read_array(folder, "signatures", "<u4", HASHES) for folder in Pieces(job).folders]


def make_bucket(job: PrepareJob, index: int, aside: Aside) -> None:
    """Find the links of documents with an equal band."""
    similarity = job.plan.build.near_duplicates
    assert similarity is not None
    pairs = links_of_band(_signatures(job), index, similarity)
    aside.write("links", pairs.astype("<i8"))
    aside.values = {"links": len(pairs)}


def make_clusters(job: PrepareJob, aside: Aside) -> None:
    """Join the links of all bands to clusters."""
    similarity = job.plan.build.near_duplicates
    assert similarity is not None
    removed, sizes = find_near_duplicates(
        _signatures(job),
        similarity,
        map=lambda _, bands: (read_array(result_of(job.folder, "buckets", band), "links", "<i8", 2) for band in bands),
    )
    aside.write("removed", removed.astype("<i8"))
    aside.values = {
        "removed": len(removed),
        "clusters": sizes.total(),
        "sizes": {str(size): sizes[size] for size in sorted(sizes)},
    }


def removed(job: PrepareJob) -> Int[np.ndarray, " R"]:
    """The documents that are left out, ascending."""
    if job.plan.build.near_duplicates is None:
        return np.zeros(0, dtype=np.int64)
    return np.asarray(read_array(result_of(job.folder, "clusters"), "removed", "<i8"))


def summary(work: Path, similarity: float) -> NearDuplicates:
    """The near-duplicates for the manifest."""
    found, banding = values_of(result_of(work, "clusters")), Banding.of(similarity)
    return NearDuplicates(
        similarity=similarity,
        ngram_words=NGRAM_WORDS,
        hashes=HASHES,
        bands=banding.bands,
        rows=banding.rows,
        clusters=found["clusters"],
        removed=found["removed"],
        cluster_sizes=found["sizes"],
    )
