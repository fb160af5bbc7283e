"""The section of a model card about the forms of an export that others serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from discern.convert.cards.markdown import render

if TYPE_CHECKING:
    from discern.convert.parity import Parity

_AGREEMENT = {
    "sign": "Tokens for which the sign of the logit is the same",
    "class": "Rows with the same class",
    "signs": "Labels with the same decision",
    "token class": "Tokens with the same prediction",
    "span": "Rows with the same start and end",
    "number": "Correlation of the numbers",
    "vector": "Mean cosine of the vectors",
}
_RUNS = {"torch": "in torch", "onnx": "in onnxruntime, float32", "int8": "in onnxruntime, int8"}


def serving_card(
    parity: Parity | None,
    pooling: str | None,
    *,
    normalize: bool,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    pad_id: int = 0,
) -> str:
    """Return a section in Markdown.

    Args:
        parity: report of the ONNX file; None: there is none.
        pooling: pooling of the text embeddings; None: it is not a sentence-transformers model.
        inputs, outputs: names of those of the ONNX file.
        pad_id: id of the padding.
    """
    return render(
        "serving.md.j2",
        parity=parity,
        int8=parity is not None and "int8" in parity.sizes,
        pooling=pooling,
        normalize=normalize,
        inputs=inputs,
        outputs=outputs,
        pad_id=pad_id,
        decided="a value" if parity is not None and parity.decision in ("vector", "number") else "a logit",
        agreement="" if parity is None else _AGREEMENT[parity.decision],
        runs=_RUNS,
    )
