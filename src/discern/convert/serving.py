"""Additional files of an export, for serving it with other software: sentence-transformers, ONNX, eight bits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from discern.artifacts.export_folder import CARD_NAME, ONNX_NAME
from discern.convert.cards.serving import serving_card
from discern.convert.forms import Form, check_form
from discern.convert.onnx import Session, check_onnx, quantize, run_graph, write_onnx
from discern.convert.onnx_graph import Served, graph_of
from discern.convert.parity import Difference, Parity, Row, Runner, compare, outputs_on, sample_rows, timed, timed_length
from discern.convert.sentence_transformers import VectorPooling, check_pooling, write_sentence_transformers
from discern.errors import ConfigError, NumericsError
from discern.progress import Progress
from discern.storage.files import sync_file
from discern.tasks.answer_heads import SpanHead, allowed_positions
from discern.tasks.readers.files import numbered_lines

_MOST_TEXTS, _MOST_EXAMPLES = 256, 1000
# A graph that computes the same differs by rounding alone, and by this much in relation to the spread of the outputs it does not.
_TOLERANCE = 1e-3
_SOURCE = "English sentences of discern"


@dataclass(frozen=True)
class Labeled:
    """Labeled examples of a task, read by the task itself, and the name of their file."""

    name: str
    examples: Sequence[Any]


@dataclass(frozen=True)
class Serving:
    """Forms of an export, besides the weights that transformers loads.

    Attributes:
        form: `model_type` to export as, one of `discern.convert.forms.FORMS`; None: the natural one.
        sentence_transformers: also write what sentence-transformers reads, with `pooling` and `normalize`.
        pooling: see `discern.convert.sentence_transformers.VectorPooling`.
        normalize: scale vectors to length 1.
        onnx: also write the model as ONNX.
        int8: with weights of eight bits, compared with the model on `texts` or `labeled`.
        max_loss: largest drop that they may cause: in the task's score, or in the fraction of decisions that stay the same.
        texts: file with one text per line to compare on; None: English sentences.
        labeled: examples of the task to compare on, which also give its score.
        max_length: longest text in tokens that sentence-transformers reads; None: as long as the model can.
    """

    form: Form | None = None
    sentence_transformers: bool = False
    pooling: VectorPooling | None = None
    normalize: bool = False
    onnx: bool = False
    int8: bool = False
    max_loss: float | None = None
    texts: Path | None = None
    labeled: Labeled | None = None
    max_length: int | None = None

    def check(self) -> None:
        """Raise a ConfigError if options contradict each other or a package is missing, before any work."""
        if self.form is not None:
            check_form(self.form)
        if self.pooling is not None:
            check_pooling(self.pooling)
        if (self.pooling is not None or self.normalize) and not self.sentence_transformers:
            raise ConfigError("--pooling and --normalize are for text embeddings", hint="add --sentence-transformers")
        if self.int8 and not self.onnx:
            raise ConfigError("--int8 is the precision of an ONNX file, but --onnx is not given", hint="add --onnx")
        if self.max_loss is not None and not self.int8:
            raise ConfigError("--max-loss limits what --int8 loses, but --int8 is not given", hint="add --onnx --int8")
        if self.max_loss is not None and not 0 <= self.max_loss <= 1:
            raise ConfigError(
                f"--max-loss is {self.max_loss:g}, expected a fraction from 0 to 1", hint="for example --max-loss 0.01"
            )
        if (self.texts is not None or self.labeled is not None) and not self.int8:
            raise ConfigError("--compare-on is for --int8, but --int8 is not given", hint="add --onnx --int8, or leave it out")
        if self.onnx:
            check_onnx()

    def of_vectors(self, pooling: VectorPooling, max_length: int) -> Serving:
        """The same forms, for a model that was trained for vectors of length 1.

        Raises:
            ConfigError: another pooling is asked for than the one that it was trained with.
        """
        if self.pooling is not None and self.pooling != pooling:
            raise ConfigError(
                f"--pooling is '{self.pooling}', but the model was trained with '{pooling}'",
                hint="leave it out, or train with --set task.pooling=" + self.pooling,
            )
        vectors = replace(self, sentence_transformers=True, pooling=pooling, normalize=True, max_length=max_length)
        # Eight bits of such a model are compared by the cosine of its vectors: a graph of vectors has no task to score.
        return replace(vectors, labeled=None)

    def add(self, folder: Path, progress: Progress) -> Parity | None:
        """Write these forms to an export that is otherwise complete.

        Args:
            folder: the folder that is being written.

        Returns:
            How far the ONNX file is from the model; None without one.

        Raises:
            ConfigError: the model cannot be expressed so.
            NumericsError: eight bits lose more than `max_loss`, or the outputs of the graph differ from those of the model.
        """
        pooling: VectorPooling | None = (self.pooling or "mean") if self.sentence_transformers else None
        if pooling is not None:
            write_sentence_transformers(folder, pooling, normalize=self.normalize, max_length=self.max_length)
        if not self.onnx:
            if pooling is not None:
                _extend(folder / CARD_NAME, serving_card(None, pooling, normalize=self.normalize))
            return None
        progress.note("writing ONNX, which takes a minute or so")
        served = graph_of(folder, pooling=pooling, normalize=self.normalize)
        parity = self._add_onnx(folder, served)
        inputs, outputs, pad_id = served.graph.inputs, served.graph.outputs, served.special.pad
        section = serving_card(parity, pooling, normalize=self.normalize, inputs=inputs, outputs=outputs, pad_id=pad_id)
        _extend(folder / CARD_NAME, section)
        return parity

    def _add_onnx(self, folder: Path, served: Served) -> Parity:
        rows, source = self._rows(served)
        path = folder / ONNX_NAME
        write_onnx(served.graph, path)

        def model(feed: Any) -> Any:
            return run_graph(served.graph, feed)

        ours = outputs_on(model, served, rows)
        written = Session(path)
        found = compare(served, rows, ours, outputs_on(written, served, rows))
        if not found.largest <= _TOLERANCE * max(1.0, found.spread):  # not a number is not close either
            raise NumericsError(
                f"the outputs of the ONNX file differ from those of the model by up to {found.largest:.2g}",
                hint="please report this with the versions of torch, onnxscript and onnxruntime; or leave out --onnx",
            )
        parity = Parity(found, served.graph.decision, len(rows), source, sizes={"float32": path.stat().st_size})
        runners: dict[str, Runner] = {"torch": model, "onnx": written}
        if self.int8:
            parity, runners["int8"] = _quantized(path, served, rows, ours, parity)
            parity = replace(parity, milliseconds={name: timed(run, served) for name, run in runners.items()})
        if self.labeled is not None:
            last = runners[list(runners)[-1]]
            scores = {name: _score(run, served, self.labeled) for name, run in (("torch", model), ("onnx", last))}
            parity = replace(parity, metric=scores["torch"][0], scores={name: score for name, (_, score) in scores.items()})
        parity = replace(parity, length=timed_length(served), threads=torch.get_num_threads())
        if self.max_loss is not None and not parity.loss <= self.max_loss:
            what = f"of {parity.metric}" if parity.scores else "of the agreement with float32"
            raise NumericsError(
                f"eight bits lose {parity.loss:.4f} {what} on {source}, more than --max-loss {self.max_loss:g}",
                hint="nothing was written; allow a larger --max-loss, leave out --int8, or give --compare-on FILE with texts "
                "like those that the model will read",
            )
        with path.open("rb") as file:
            sync_file(file)
        return parity

    def _rows(self, served: Served) -> tuple[list[Row], str]:
        """Rows to compare on, and what they are."""
        if self.labeled is not None:
            return _encoded(served, self.labeled), self.labeled.name
        if self.texts is not None:
            lines = (line.strip() for _, line in numbered_lines(self.texts))
            texts = list(islice((line for line in lines if line), _MOST_TEXTS))
            if not texts:
                raise ConfigError(
                    f"{self.texts} has no text to compare on", hint="give a file with one text per line: --compare-on FILE"
                )
            return sample_rows(served, texts), self.texts.name
        return sample_rows(served), _SOURCE


def _extend(card: Path, section: str) -> None:
    """Add a section to a model card."""
    card.write_text(f"{card.read_text(encoding='utf-8').rstrip()}\n\n{section.strip()}\n", encoding="utf-8")


def _quantized(path: Path, served: Served, rows: list[Row], ours: Any, parity: Parity) -> tuple[Parity, Session]:
    """Replace a file by the better of its two copies in eight bits: with a scale per column of a matrix, or one for all of it."""
    found: list[tuple[tuple[float, float], Difference, bool, Path]] = []
    for per_channel in (True, False):
        copy = path.with_name(f"{path.name}.{int(per_channel)}")
        quantize(path, copy, per_channel=per_channel)
        each = compare(served, rows, ours, outputs_on(Session(copy), served, rows))
        found.append(((1 - each.agreement, each.largest), each, per_channel, copy))
    _, difference, per_channel, best = min(found, key=lambda one: one[0])
    os.replace(best, path)
    for *_, copy in found:
        copy.unlink(missing_ok=True)
    sizes = parity.sizes | {"int8": path.stat().st_size}
    return replace(parity, difference=difference, sizes=sizes, per_channel=per_channel), Session(path)


def _encoded(served: Served, labeled: Labeled) -> list[Row]:
    """The rows of labeled examples."""
    features = _features(served, labeled)
    count = len(features.input_ids)
    return [(features.input_ids[row].astype(np.int64), features.token_types[row].astype(np.int64)) for row in range(count)]


def _features(served: Served, labeled: Labeled) -> Any:
    assert served.task_model is not None  # only a task has labeled examples
    return served.task_model.task().encode(labeled.examples[:_MOST_EXAMPLES], served.task_model.text, labeled=False)


def _score(run: Runner, served: Served, labeled: Labeled) -> tuple[str, float]:
    """Name and value of the headline metric of the task on labeled examples."""
    assert served.task_model is not None
    task = served.task_model.task()
    examples = labeled.examples[:_MOST_EXAMPLES]
    rows = _encoded(served, labeled)
    found = zip(rows, outputs_on(run, served, rows), strict=True)
    outputs = [_as_of_the_head(served, row, each) for row, each in found]
    scores = task.score(examples, task.predict(examples, _features(served, labeled), outputs))
    return next(iter(scores.values.items()))


def _as_of_the_head(served: Served, row: Row, found: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of a graph for a row, as the head of the task gives them."""
    assert served.task_model is not None
    task = served.task_model.task()
    head = served.task_model.objective.heads[task.name]
    if isinstance(head, SpanHead):
        segments = torch.from_numpy(row[1])[None]
        allowed = allowed_positions(torch.ones_like(segments, dtype=torch.bool), segments)
        start, end = (torch.from_numpy(found[name])[None] for name in ("start_logits", "end_logits"))
        return {name: values[0].numpy() for name, values in head.search(start, end, allowed).items()}
    if task.labels.kind == "number":
        return {"logits": (found["logits"] - task.labels.shift) / task.labels.scale}
    return dict(found)
