"""The task `pairs`: its files, which the user names, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from discern.errors import ConfigError
from discern.tasks import families
from discern.tasks.base import Definition, Source, TaskConfig
from discern.tasks.contrastive import NAME, ContrastiveConfig, headline_metrics
from discern.tasks.examples import Reading, TextGroup
from discern.tasks.readers.table import TableFormat, open_table
from discern.tasks.readers.text_groups import GroupColumns, group_columns, is_retrieval, read_groups, read_retrieval

# A step compares each anchor with the positives of all rows.
_ROWS_PER_STEP = 64
# Few pairs are soon learned: of 316 pairs, nDCG after 117 of 247 steps was within 0.002 of its best (benchmarks/records,
# "embeddings").
_MIN_STEPS = 150
# Of texts alone, whose two vectors differ by nothing else. Gao et al. 2021, "SimCSE", table 2: 0.1 is best.
_DROPOUT = 0.1


@dataclass(frozen=True)
class PairsSource(Source[TextGroup]):
    """Tables of pairs of texts, and folders of queries and documents to evaluate on (or one of their files in `qrels`).

    Attributes:
        columns: columns that the user named.
        format: format of the tables; None: recognized by name and content.
        settings: settings that decide what is read.
        alone: whether the training file has single texts.
        judged: whether models are evaluated on the similarity of judged pairs.
        recorded: whether this is the source of a trained model. It is evaluated on any folder: as in BEIR, whose files of
            queries are for several splits, queries without a relevant document are left out.
    """

    reads_folders: ClassVar[bool] = True
    columns: GroupColumns = field(default_factory=GroupColumns)
    format: TableFormat | None = None
    settings: ContrastiveConfig = field(default_factory=ContrastiveConfig)
    alone: bool = False
    judged: bool = False
    recorded: bool = False

    @property
    def needs_dropout(self) -> bool:
        """Whether dropout is needed: without cropping, the two copies of a single text differ only by dropout (SimCSE)."""
        return self.alone and self.settings.positives == "dropout"

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> PairsSource:
        """The source from its `record`."""
        return cls(GroupColumns(**record["columns"]), record["format"], alone=record.get("alone", False), recorded=True)

    def configured(self, config: TaskConfig) -> PairsSource:
        return replace(self, settings=cast(ContrastiveConfig, config))

    def record(self) -> dict[str, Any]:
        return {"columns": asdict(self.columns), "format": self.format, "alone": self.alone}

    def splits(self, folder: Path) -> dict[str, Path]:
        """Empty: the files are named one by one."""
        return {}

    def read(self, path: Path, split: str, *, labeled: bool = True) -> Reading[TextGroup]:
        training = split == "train"
        if training and self.settings.positives == "crop" and not self.alone:
            raise ConfigError(
                f"task.positives is 'crop', which is for single texts, but {path} has pairs",
                hint="leave it out, or train on a file with the single column 'text'",
            )
        if is_retrieval(path):
            if training:
                what = "is a folder" if path.is_dir() else "says which documents are relevant to queries"
                raise ConfigError(
                    f"{path} {what}, which can only be evaluated on", hint="train on a table of pairs: --train FILE"
                )
            which: Literal["dev", "test"] = "dev" if split == "dev" else "test"
            return read_retrieval(path, which, "leave-out" if self.recorded else self.settings.unjudged)
        reading = read_groups(
            path,
            self.columns,
            training=training,
            format=self.format,
            positive_score=self.settings.positive_score if training else None,
            labeled=labeled,
            judged=self.judged,
        )
        if not training and len(reading.examples[0].texts) < 2:
            raise ConfigError(
                f"{path} has single texts, but an evaluation needs pairs",
                hint="give pairs (anchor, positive), judged pairs (sentence1, sentence2, score), or a folder of queries",
            )
        return reading


def pairs_definition(
    train: Path, dev: Path | None, columns: GroupColumns, format: TableFormat | None, settings: Mapping[str, object]
) -> Definition[TextGroup]:
    """The definition of the task for these files.

    Args:
        train: table of pairs, or of single texts.
        dev: table of pairs, folder of queries and documents, or a file in its `qrels`; None: a part of the pairs is held out.
        settings: the settings of `ContrastiveConfig` that the user gave, unchecked.

    Raises:
        ConfigError: the training file has no such column, a column cannot be recognized, or there are only single texts to
            evaluate on.
        DataError: a file cannot be read.
    """
    if is_retrieval(train):
        PairsSource().read(train, "train")
    table = open_table(train, format)
    # A file to evaluate on may have other columns than those named.
    for column, option in ((columns.text, "--text"), (columns.pair, "--pair"), (columns.label, "--label")):
        if column is not None:
            table.require(column, option)
    found = group_columns(table, columns)
    if found.positive is None and dev is None:
        raise ConfigError(
            f"{train} has single texts rather than pairs, so none of it can be held out to evaluate on",
            hint="--dev FILE: judged pairs (sentence1, sentence2, score), pairs (anchor, positive), or a folder of queries; if "
            "these are pairs, name the second text: --pair COLUMN",
        )
    if dev is None:  # what is held out keeps its scores unless they chose the positives
        judged = found.score is not None and settings.get("positive_score") is None
    else:
        judged = not is_retrieval(dev) and group_columns(open_table(dev, format), columns).score is not None
    alone = found.positive is None
    defaults: dict[str, object] = {"train.sequences_per_step": _ROWS_PER_STEP, "finetune.min_steps": _MIN_STEPS}
    if alone and settings.get("positives") != "crop":
        defaults["finetune.dropout"] = _DROPOUT
    source = PairsSource(columns, format, alone=alone, judged=judged)
    return Definition(NAME, families.load(NAME), source, headline_metrics(judged=judged), defaults=defaults)
