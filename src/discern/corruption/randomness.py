"""Random numbers as a function of (seed, step, example), without state that would have to be saved."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer: the increment of SplitMix64


@dataclass(frozen=True)
class Randomness:
    """The random numbers of one step, the same whatever the number of workers, ranks and micro-batches.

    Every number is a hash of (seed, purpose, step, index of the example in the global batch, position).

    Attributes:
        seed: seed of the run.
        step: number of the update.
        examples: (B,) index of each row in the global batch.

    Reference: Salmon et al. 2011 (counter-based generators); the mixing is SplitMix64's, Steele et al. 2014.
    """

    seed: int
    step: int
    examples: Int[Tensor, "B"]

    def to(self, device: torch.device) -> Randomness:
        """The same numbers, drawn on another device."""
        return replace(self, examples=self.examples.to(device, non_blocking=True))

    def rows(self, start: int, stop: int) -> Randomness:
        """The numbers of rows `start` to `stop`, as a micro-batch."""
        return replace(self, examples=self.examples[start:stop])

    def integers(self, purpose: str, length: int) -> Int[Tensor, "B L"]:
        """64-bit integers, `length` per row, different for every `purpose`."""
        seed = torch.tensor((self.seed + 2**63) % 2**64 - 2**63)
        key = _mix(_mix(seed ^ _purpose_key(purpose)) + self.step).item()
        rows = _mix(_mix(self.examples.long() + 1) ^ key)
        positions = torch.arange(1, length + 1, device=rows.device) * _GOLDEN
        return _mix(rows[:, None] + positions[None, :])

    def uniforms(self, purpose: str, length: int) -> Float[Tensor, "B L"]:
        """Numbers in [0, 1) in steps of 2^-24, float32."""
        return _shift(self.integers(purpose, length), 40).float() * 2.0**-24

    def exponentials(self, purpose: str, length: int) -> Float[Tensor, "B L"]:
        """Standard exponential numbers, float64: -ln of a uniform number strictly between 0 and 1, in steps of 2^-53."""
        return -((_shift(self.integers(purpose, length), 11).double() + 0.5) * 2.0**-53).log()


def key_of(*parts: int | str) -> int:
    """A 63-bit seed for a stateful generator, from the parts that identify its use: (seed, "dropout", step, rank)."""
    return _purpose_key("\x1f".join(str(part) for part in parts)) & (2**63 - 1)


def _purpose_key(purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little", signed=True)


def _shift(value: Tensor, bits: int) -> Tensor:
    # torch shifts signed integers arithmetically; the generator wants zeros from the left.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64; the products wrap, as in the original."""
    value = (value ^ _shift(value, 30)) * -4658895280553007687
    value = (value ^ _shift(value, 27)) * -7723592293110705685
    return value ^ _shift(value, 31)
