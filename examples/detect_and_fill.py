"""Find the word that looks wrong, and predict replacements for it. The model needs a discriminator and a generator.

python examples/detect_and_fill.py [MODEL]
"""

from __future__ import annotations

import sys
from pathlib import Path

import discern

MODEL = Path(__file__).parent / "models" / "modern-cpu"
TEXTS = [
    "The city was founded in the nineteenth century and has 12,000 people.",
    "The city was founded in the nineteenth because and has 12,000 people.",
    "He was born in London and studied at the university of Cambridge.",
    "He was born in London and studied at the university of of Cambridge.",
]


def main(folder: str | Path = MODEL) -> None:
    model = discern.load(folder)
    for found in model.detect(TEXTS):
        probability, (start, end) = max(zip(found.replaced_probability, found.offsets, strict=True))
        print(f"{found.text}\n    most suspicious, with probability {probability:.2f}: {found.text[start:end]!r}")
        (mask,) = model.fill(f"{found.text[:start]}[MASK]{found.text[end:]}", top=3)
        print("    instead:", ", ".join(f"{each.token} ({each.probability:.2f})" for each in mask))


if __name__ == "__main__":
    main(*sys.argv[1:])
