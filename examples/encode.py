"""Find similar sentences: encode texts as vectors with a model of discern, or any ELECTRA or BERT folder.

python examples/encode.py [MODEL]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import discern

MODEL = Path(__file__).parent / "models" / "modern-cpu"
TEXTS = [
    "The village lies on the left bank of the river.",
    "The town is on the eastern shore of the lake.",
    "He scored two goals in the final match of the season.",
    "She won the second game of the championship.",
    "The album was released in the spring by a small label.",
]


def main(folder: str | Path = MODEL) -> None:
    model = discern.load(folder)
    vectors = model.encode(TEXTS)  # (5, hidden size), float32: the mean of each text's token states
    print(f"{len(TEXTS)} texts, vectors of {model.hidden_size} numbers")

    # All mean vectors share a large common component; subtracting the mean of all texts makes their differences visible.
    vectors = vectors - vectors.mean(0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -1)
    for text, row in zip(TEXTS, likeness, strict=True):
        print(f"{text}\n    most like ({row.max():.2f}): {TEXTS[row.argmax()]}")

    states = model.encode(TEXTS[:1], pooling="none")[0]  # one row per token
    tokens = model.tokenizer.encode(TEXTS[0], add_special_tokens=False).tokens
    print(f"token by token: {states.shape[0]} rows for {' '.join(tokens)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
