"""Compare the likelihood of two sentences. A score is a sum over tokens, which `score_tokens` returns one by one.

python examples/score.py [MODEL]
"""

from __future__ import annotations

import sys
from pathlib import Path

import discern

MODEL = Path(__file__).parent / "models" / "modern-cpu"
PAIRS = [
    ("He was elected to the senate in 1994.", "He was elected to the senate on 1994."),
    ("The children play in the garden.", "The children plays in the garden."),
    ("It is one of the largest cities in the country.", "It is one of the largest city in the country."),
]


def main(folder: str | Path = MODEL) -> None:
    model = discern.load(folder)
    # By default one pass of the discriminator; scorer="pll" masks each token in turn and asks the generator.
    scores = model.score([text for pair in PAIRS for text in pair]).reshape(-1, 2)
    for pair, (first, second) in zip(PAIRS, scores, strict=True):
        for text, score in zip(pair, (first, second), strict=True):
            print(f"{score:8.2f}  {text}")
        print(f"{'':10}likelier: the {'first' if first > second else 'second'}")

    (score,) = model.score_tokens([PAIRS[0][1]])
    print(
        "token by token:",
        ", ".join(f"{token} {value:.2f}" for token, value in zip(score.tokens, score.token_scores, strict=True)),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
