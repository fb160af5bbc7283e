"""The nine tasks of GLUE."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from discern.tasks.base import Definition, Source
from discern.tasks.classification import Classification
from discern.tasks.examples import ClassificationExample, Reading
from discern.tasks.readers.glue import GLUE, glue_splits, read_glue_file

# Paper, appendix B: three epochs, ten for the two smallest tasks that it reports.
_EPOCHS = {"rte": 10.0, "stsb": 10.0}


@dataclass(frozen=True)
class GlueSource(Source[ClassificationExample]):
    """The official TSV files of one task."""

    task: str

    def text_names(self) -> tuple[tuple[str, ...], ...]:
        return GLUE[self.task].columns

    def splits(self, folder: Path) -> dict[str, Path]:
        return glue_splits(self.task, folder)

    def read(self, path: Path, split: str, *, labelled: bool = True) -> Reading[ClassificationExample]:
        return read_glue_file(self.task, path, labelled=labelled)


def _definition(name: str) -> Definition[ClassificationExample]:
    task = GLUE[name]
    # The scores of STS-B go from 0 to 5; those of the network from 0 to 1, as in the released code.
    labels = task.labels or ("0", "5")
    defaults: dict[str, object] = {"finetune.epochs": _EPOCHS[name]} if name in _EPOCHS else {}
    further = ("dev_mismatched",) if "dev_mismatched" in task.files else ()
    return Definition(name, Classification, GlueSource(name), task.metrics, labels, defaults, further)


COLA, SST2, MRPC, STSB, QQP, MNLI, QNLI, RTE, WNLI = map(_definition, GLUE)
