"""Fused operations for CPUs, compiled on first use; callers have a plain PyTorch path for machines without a C compiler."""

from discern.kernels.build import load_kernels
from discern.kernels.functions import (
    adamw,
    attention,
    bias_gelu,
    cross_entropy_sum,
    dense,
    dropout,
    gradient_norm,
    relative_softmax,
    residual_norm,
    sample,
    scale_gradients,
    switched_off,
    threshold,
    usable,
)

__all__ = [
    "adamw",
    "attention",
    "bias_gelu",
    "cross_entropy_sum",
    "dense",
    "dropout",
    "gradient_norm",
    "load_kernels",
    "relative_softmax",
    "residual_norm",
    "sample",
    "scale_gradients",
    "switched_off",
    "threshold",
    "usable",
]
