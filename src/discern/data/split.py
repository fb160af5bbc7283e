"""Decides which documents are held out: by what they say, so that exact duplicates fall on the same side."""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Float

from discern.data.blocks import TokenBlock
from discern.data.manifest import SplitName

Placed = list[tuple[SplitName, TokenBlock]]


class HeldoutSplit:
    """Sends each document to `train` or `heldout` by a keyed hash of its content.

    With two or more distinct documents neither side stays empty: until both have one, the document nearest to the border
    is kept back, and changes sides if nothing else would be there. So memory is that of one document.

    Args:
        fraction: expected share of documents held out; 0 holds out none.
        seed: key of the hash.
    """

    def __init__(self, fraction: float, seed: int) -> None:
        self._fraction = fraction
        self._key = seed.to_bytes(16, "little", signed=True)
        self._settled = fraction == 0
        self._kept: TokenBlock | None = None
        self._copies = 0
        self._several = False

    def place(self, block: TokenBlock) -> Placed:
        """The parts of a block that can be written now, in order."""
        placed: Placed = []
        first = 0
        while not self._settled and first < block.num_documents:
            placed += self._place_one(block.documents(first, first + 1))
            first += 1
        if first < block.num_documents:
            rest = block.documents(first, block.num_documents)
            held = self._ranks(rest) < self._fraction
            for split, chosen in (("train", ~held), ("heldout", held)):
                if chosen.any():
                    placed.append((split, rest.select(chosen)))  # type: ignore[arg-type]
        return placed

    def finish(self) -> Placed:
        """What is still kept back, at the end of the input."""
        if self._kept is None:
            return []
        kept, copies, self._kept = self._kept, self._copies, None
        side = self._side(kept)
        other: SplitName = "train" if side == "heldout" else "heldout"
        # Alone in the world it is trained on; otherwise all others went to its own side, and it fills the empty one.
        return [(other if self._several else "train", kept)] * copies

    def _place_one(self, document: TokenBlock) -> Placed:
        """Before both sides have a document: keep back whichever is nearest to the border."""
        kept = self._kept
        if kept is None:
            self._kept, self._copies = document, 1
            return []
        if (document.digests == kept.digests).all():
            self._copies += 1
            return []
        self._several = True
        side, copies = self._side(kept), self._copies
        if self._side(document) != side:
            self._settled, self._kept = True, None
            return [(side, kept)] * copies + [(self._side(document), document)]
        if self._distance(document) < self._distance(kept):
            self._kept, self._copies = document, 1
            return [(side, kept)] * copies
        return [(side, document)]

    def _side(self, document: TokenBlock) -> SplitName:
        return "heldout" if self._ranks(document)[0] < self._fraction else "train"

    def _distance(self, document: TokenBlock) -> tuple[float, bytes]:
        return abs(float(self._ranks(document)[0]) - self._fraction), document.digests.tobytes()

    def _ranks(self, block: TokenBlock) -> Float[np.ndarray, " D"]:
        """(D,) uniform in [0, 1), from the content's digest and the seed."""
        hashes = (hashlib.blake2b(digest, digest_size=8, key=self._key).digest() for digest in block.digests)
        return np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.float64) / 2.0**64
