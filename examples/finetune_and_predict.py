"""Fine-tune on a small labelled file, then ask the result about new texts: all in a folder that goes away again.

python examples/finetune_and_predict.py [MODEL]
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

import discern

MODEL = Path(__file__).parent / "models" / "cpu-small"
PLACES = ["river", "lake", "island", "mountain", "valley", "village"]
PEOPLE = ["singer", "painter", "player", "bishop", "writer", "soldier"]
NEW_TEXTS = ["The forest lies in the north of the country.", "The actor was born in 1931 and died in 1990."]


def labelled() -> list[tuple[str, str]]:
    """A few sentences about places and about people."""
    places = [
        (f"The {word} lies in the {side} of the country.", "place") for word in PLACES for side in ("south", "west", "east")
    ]
    people = [(f"The {word} was born in {year} and died in 1950.", "person") for word in PEOPLE for year in (1880, 1891, 1902)]
    return places + people


def main(folder: str | Path = MODEL) -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        with (work / "train.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *labelled()])
        (work / "new.txt").write_text("\n".join(NEW_TEXTS) + "\n", encoding="utf-8")

        request = discern.FinetuneRequest(
            model=str(folder),
            out=work / "fine-tuned",
            overrides=[f"files.train={str(work / 'train.csv')!r}", "train.max_steps=20", "optimizer.learning_rate=5e-4"],
        )
        results = discern.finetune(request, discern.Silent())
        print(f"{results['metric']} on the tenth that was held out: {results['median']:.2f}")

        predictions: list[dict[str, Any]] = []
        discern.predict(discern.PredictRequest(work / "fine-tuned", work / "new.txt"), predictions.extend, discern.Silent())
        for text, prediction in zip(NEW_TEXTS, predictions, strict=True):
            print(f"{prediction['label']:<8}{text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
