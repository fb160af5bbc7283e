"""Fine-tune on a small labeled file, then predict the labels of new texts, in a temporary folder.

python examples/finetune_and_predict.py [MODEL]
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

import discern

MODEL = Path(__file__).parent / "models" / "modern-cpu"
PLACES = ["river", "lake", "island", "mountain", "valley", "village"]
PEOPLE = ["singer", "painter", "player", "bishop", "writer", "soldier"]
NEW_TEXTS = ["The forest lies in the north of the country.", "The actor was born in 1931 and died in 1990."]


def labeled() -> list[tuple[str, str]]:
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
            csv.writer(file).writerows([("text", "label"), *labeled()])
        results = discern.finetune(
            folder,
            train=work / "train.csv",
            out=work / "fine-tuned",
            settings={"train.max_steps": 20, "optimizer.learning_rate": 5e-4},
        )
        print(f"{results['metric']} on the tenth that was held out: {results['median']:.2f}")
        for text, said in zip(NEW_TEXTS, discern.load(work / "fine-tuned").predict(NEW_TEXTS), strict=True):
            print(f"{said['label']:<8}{said['probability']:.2f}  {text}")

    # The same with the interface of scikit-learn: no files.
    texts, labels = zip(*labeled(), strict=True)
    settings = {"train.max_steps": 20, "optimizer.learning_rate": 5e-4}
    classifier = discern.TextClassifier(folder, settings=settings).fit(texts, labels)
    print(*classifier.predict(NEW_TEXTS))


if __name__ == "__main__":
    main(*sys.argv[1:])
