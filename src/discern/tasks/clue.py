"""Chinese classification: ChnSentiCorp and TNEWS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from discern.tasks.base import Definition, Source
from discern.tasks.classification import Classification
from discern.tasks.examples import ClassificationExample, Reading
from discern.tasks.readers.clue import CHNSENTICORP_FILES, CLUE, CLUE_FILES, read_chnsenticorp, read_clue
from discern.tasks.readers.files import optional_split_file


@dataclass(frozen=True)
class ClueSource(Source[ClassificationExample]):
    """The JSON lines of one task of CLUE, or of FewCLUE."""

    task: str

    def splits(self, folder: Path) -> dict[str, Path]:
        return _there(folder, CLUE_FILES)

    def read(self, path: Path, split: str, *, labelled: bool = True) -> Reading[ClassificationExample]:
        return read_clue(self.task, path, labelled=labelled)


@dataclass(frozen=True)
class ChnSentiCorpSource(Source[ClassificationExample]):
    """The TSV files of ChnSentiCorp."""

    def splits(self, folder: Path) -> dict[str, Path]:
        return _there(folder, CHNSENTICORP_FILES)

    def read(self, path: Path, split: str, *, labelled: bool = True) -> Reading[ClassificationExample]:
        return read_chnsenticorp(path, labelled=labelled)


def _there(folder: Path, names: dict[str, tuple[str, ...]]) -> dict[str, Path]:
    found = {split: optional_split_file(folder, files) for split, files in names.items()}
    return {split: path for split, path in found.items() if path is not None}


# A review has 100 characters on average and up to some thousands; BERT-wwm and others cut it to 256.
CHNSENTICORP: Definition[ClassificationExample] = Definition(
    "chnsenticorp",
    Classification,
    ChnSentiCorpSource(),
    ("accuracy",),
    ("0", "1"),
    {"task.sequence_length": 256},
    ("test",),
)
# The test file of CLUE has no labels, that of FewCLUE has: it is evaluated where there is no dev file, and not reported.
TNEWS: Definition[ClassificationExample] = Definition(
    "tnews", Classification, ClueSource("tnews"), ("accuracy",), CLUE["tnews"].labels
)
