"""SplitMix64: pseudo-random numbers as a function of numbers.

Reference: Steele et al. 2014.
"""

from __future__ import annotations

import numpy as np


def mix(values: np.ndarray) -> np.ndarray:
    """The finalizer: each bit of a number changes half of the bits of the result."""
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB
    values ^= values >> 31
    return values


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Pseudo-random values of numbers: those of neighboring numbers are unrelated."""
    return mix(values * 0x9E3779B97F4A7C15)
