"""A model as an ONNX file, in float32 or with weights of eight bits, and how far the file is from the model.

A `Graph` is what `torch.onnx.export` traces: token ids to logits, states or vectors.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from discern import kernels
from discern.data.tokenizer import special_tokens
from discern.data.tokenizer.tokens import encode_texts
from discern.errors import ConfigError, NumericsError
from discern.model_files.folder import TaskModel
from discern.model_files.huggingface import HuggingFaceFolder
from discern.models.heads import mean_state
from discern.storage.files import sync_file, write_bytes
from discern.tasks.answer_heads import JointHead, SpanHead, allowed_positions
from discern.tasks.classification import ClassificationHead
from discern.tasks.features import TaskRows
from discern.tasks.tagging import TaggingHead
from discern.types import TokenBatch

VectorPooling: TypeAlias = Literal["mean", "mean-all", "cls"]
"""What the vector of a text is. 'mean': the mean of the states of its tokens without [CLS] and [SEP], as in `Model.encode`.
'mean-all': the mean of all of its states, the only mean that other servers have. 'cls': the state of [CLS]; in `Model.encode`,
`pooling="first"`."""
Decision: TypeAlias = Literal["sign", "largest", "number", "vector"]
"""What a model decides, by which its copies are compared. 'sign': of each logit; 'largest': the largest logit of
a row or a token, or the token where an answer starts or ends; 'number' and 'vector' decide nothing and are compared by
correlation and cosine."""
Arrays: TypeAlias = dict[str, NDArray[Any]]
Runner: TypeAlias = Callable[[Arrays], Arrays]
"""Inputs by name, each (B, L), to outputs by name."""
Row: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Token ids and segments of a row, with [CLS] and [SEP]."""
ONNX_NAME = "model.onnx"
# A file of ONNX is one message of protocol buffers, which are limited to 2 GiB.
_MOST_BYTES = 2**31 - 2**24
_BATCH, _SEED, _FRACTION, _MOST_EXAMPLES = 16, 7, 0.15, 1000
# Largest difference between graph and model that rounding explains, as a fraction of the spread of the outputs.
_TOLERANCE = 1e-3
# Ordinary sentences, for models whose user gives no text.
_SENTENCES = """The bridge over the river was built of stone and has carried carts, horses and later cars for three centuries.
Most of the snow had melted by the time the first visitors came up the valley.
She asked whether the library would be open on Sunday, but nobody at the desk knew.
A short walk from the station leads to the old market, where fish is sold in the morning.
The committee will publish its report next year, and its members do not expect it to change much.
When the engine stopped, the captain sent two of his men to look for help.
Prices rose by four percent in March, more than economists had predicted.
He wrote the letter twice and sent neither version.
Bread, cheese and a few apples were all that was left in the kitchen.
The new method needs less memory than the old one, although it is no faster on small problems.
Children learn the names of colors later than the names of things.
In the north of the country it rains for most of the winter, and the roads are often closed.
The film was praised for its music, while its plot was found hard to follow.
Two of the three players who were hurt last week are expected to return on Friday.
Water boils at a lower temperature in the mountains than at the coast.
The museum bought the painting from a family that had owned it since 1874.""".split("\n")


def check_onnx() -> None:
    """Raise a ConfigError if a package is missing that writes or runs ONNX."""
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"ONNX needs {' and '.join(missing)}", hint="pip install 'discern-nlp[onnx]'")


class Graph(nn.Module):
    """A model that discern exported, as a function of tensors: a network, an encoder, or a fine-tuned model.

    Args:
        opened: the folder of the export.
        pooling: give the vectors of texts instead of what the head computes; None: give that, or without a head the states.
        normalize: scale the vectors to length 1.

    Attributes:
        outputs: names of its outputs, in order.
        decision: how its copies are compared.
        decisive: the outputs by which they are.
        per_token: the outputs of every token, (B, L, ...).
        has_segments: whether it reads `token_type_ids`.
        max_length: number of tokens that it was trained to read.
        task_model: the fine-tuned model; None for other models.
        reads_pairs: whether its rows are pairs of texts.
        corrupts: what a comparison does with some tokens so that the model has something to decide.

    Raises:
        CheckpointError: the weights are missing or damaged.
        ConfigError: models of this architecture, or the head of the task, have no graph.
    """

    def __init__(self, opened: HuggingFaceFolder, pooling: VectorPooling | None = None, *, normalize: bool = False) -> None:
        super().__init__()
        if opened.architecture.no_graph is not None:
            raise ConfigError(
                f"this model cannot be exported to ONNX: {opened.architecture.no_graph}",
                hint="leave out --onnx, and serve it with transformers; encoder 'bert' can be exported to ONNX",
            )
        self.tokenizer, self.special = opened.tokenizer, special_tokens(opened.tokenizer)
        self.max_length, self.has_segments = opened.max_length, opened.architecture.has_segments
        self.task_model: TaskModel | None = None
        self.reads_pairs = False
        self.corrupts: Literal["replace", "mask"] | None = None
        self.outputs: tuple[str, ...] = ("logits", "last_hidden_state")
        self.decision: Decision
        network = opened.stored.network
        self.encoder, self.head, self.bilinear = network.encoder, network.head, network.bilinear
        self._network, self._pooling, self._normalize = network, pooling, normalize
        if opened.has_task_head and pooling is None:
            self.task_model = opened.task_model()
            task = self.task_model.task()
            self.head = self.task_model.objective.heads[task.name]
            if type(self.head) not in (ClassificationHead, TaggingHead, SpanHead):
                searches = ": the end of an answer depends on its start, which takes a search" * isinstance(self.head, JointHead)
                raise ConfigError(
                    f"a head of the class {type(self.head).__name__} cannot be exported to ONNX{searches}",
                    hint="leave out --onnx; for questions, fine-tune with --set task.head=span",
                )
            self.has_segments |= getattr(self.head, "pooling", "cls") == "pair"
            self.max_length, self._labels = task.config.sequence_length, task.labels
            self.reads_pairs = task.labels.pairs or task.labels.kind == "spans"
            self.outputs = ("start_logits", "end_logits") if task.labels.kind == "spans" else ("logits",)
            kinds: dict[str, Decision] = {"multi": "sign", "number": "number"}
            self.decision = kinds.get(task.labels.kind, "largest")
            self.decisive = self.outputs
            self.per_token = self.outputs if task.labels.kind in ("tags", "spans") else ()
        elif pooling is None and network.predicts != "nothing":
            judges = network.predicts in ("replaced", "energy")
            self.decision, self.corrupts = ("sign", "replace") if judges else ("largest", "mask")
            self.decisive, self.per_token = self.outputs[:1], self.outputs
        else:
            # The states come first, where servers that pool themselves look for them.
            self.outputs = ("last_hidden_state", "sentence_embedding") if pooling else ("last_hidden_state",)
            self.decision, self.decisive, self.per_token = "vector", self.outputs[-1:], ("last_hidden_state",)
            self.head, self.bilinear = nn.Identity(), None
        self.eval()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs, each (B, L) and int64, in order; as in transformers."""
        return ("input_ids", "attention_mask", *(("token_type_ids",) if self.has_segments else ()))

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None = None,
    ) -> tuple[Tensor, ...]:
        """The outputs in order, named and scaled as in transformers; those of padding are undefined.

        Args:
            attention_mask: 1 = real token, 0 = padding.
            token_type_ids: segments; None: all 0.
        """
        real, segments = attention_mask != 0, torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        hidden = self.encoder(input_ids, real, segments)
        if self.decision == "vector":
            if self._pooling is None:
                return (hidden,)
            counted = real
            if self._pooling == "mean":
                counted = real & (input_ids != self.special.cls) & (input_ids != self.special.sep)
            vectors = hidden[:, 0] if self._pooling == "cls" else mean_state(hidden, counted)
            return hidden, nn.functional.normalize(vectors, dim=-1) if self._normalize else vectors
        if self.task_model is None:
            return self._network.logits_of(hidden, input_ids), hidden
        head: Any = self.head
        if isinstance(head, SpanHead):
            return tuple(head.output(hidden if head.inner is None else head.inner(hidden)).unbind(-1))
        everything = torch.arange(input_ids.shape[0], device=input_ids.device)
        tokens = TokenBatch(
            input_ids=input_ids,
            attention_mask=real,
            special_tokens_mask=~real,
            token_type_ids=segments,
            position_ids=torch.zeros_like(input_ids),
            document_ids=None,
            word_starts=None,
            example_index=everything,
            slot=everything,
        )
        states = head.inputs(hidden, self.encoder, input_ids)
        logits: Tensor = head(states, tokens, TaskRows("", everything, everything, {}))[1]["logits"]
        return (logits * self._labels.scale + self._labels.shift if self.decision == "number" else logits,)

    def run(self, feed: Arrays) -> Arrays:
        """The outputs for a batch."""
        with torch.inference_mode():
            found = self(*(torch.from_numpy(feed[name]) for name in self.inputs))
        return {name: tensor.float().numpy() for name, tensor in zip(self.outputs, found, strict=True)}


def add_onnx(
    graph: Graph,
    path: Path,
    *,
    int8: bool,
    texts: Sequence[str] | None,
    labeled: Sequence[Any] | None,
    source: str,
) -> dict[str, Any]:
    """Write a model as ONNX, and compare the file with the model.

    Args:
        int8: with weights of eight bits: with a scale per column of a matrix or one for all of it, whichever is closer.
        texts: texts to compare on; None: English sentences, or random tokens if the vocabulary lacks their words.
        labeled: examples of the task to compare on instead, which also give its score.
        source: what is compared on, in words.

    Returns:
        The report: `largest_difference` of an output, the `spread` of the model's outputs, the `agreement` of decisions,
        `scores` on the `metric` of the task, sizes of the files, and `loss`: what was lost of the score if it is known,
        otherwise the fraction of decisions that changed.

    Raises:
        ConfigError: the weights are too large for one file.
        NumericsError: the outputs of the file differ from those of the model.
    """
    examples = None if labeled is None else labeled[:_MOST_EXAMPLES]
    if examples is None:
        rows = sample_rows(graph, texts)
    else:
        assert graph.task_model is not None  # only a task has labeled examples
        task = graph.task_model.task()
        features = task.encode(examples, graph.task_model.text, labeled=False)
        both = features.input_ids, features.token_types
        rows = [(both[0][row].astype(np.int64), both[1][row].astype(np.int64)) for row in range(len(both[0]))]
    write_onnx(graph, path)
    sizes = {"float32": path.stat().st_size}
    outputs = {"torch": outputs_on(graph.run, graph, rows), "onnx": outputs_on(session(path), graph, rows)}
    report = compare(graph, rows, outputs["torch"], outputs["onnx"])
    if not report["largest_difference"] <= _TOLERANCE * max(1.0, report["spread"]):  # not a number is not close either
        raise NumericsError(
            f"the outputs of the ONNX file differ from those of the model by up to {report['largest_difference']:.2g}",
            hint="please report this with the versions of torch, onnxscript and onnxruntime; or leave out --onnx",
        )
    if int8:
        copies = []
        for per_channel in (True, False):
            copy = path.with_name(f"{path.name}.{int(per_channel)}")
            quantize(path, copy, per_channel=per_channel)
            found = outputs_on(session(copy), graph, rows)
            each = compare(graph, rows, outputs["torch"], found) | {"per_channel": per_channel}
            copies.append((-each["agreement"], each["largest_difference"], copy, each, found))
        *_, best, report, outputs["onnx"] = min(copies, key=lambda one: one[:2])
        os.replace(best, path)
        for _, _, copy, *_ in copies:
            copy.unlink(missing_ok=True)
        sizes["int8"] = path.stat().st_size
    scores: dict[str, float] = {}
    report |= {"file_bytes": sizes, "compared_on": source, "rows": len(rows), "loss": 1.0 - report["agreement"]}
    report |= {"metric": None, "scores": scores}
    if examples is not None:
        for name, found in outputs.items():
            given = [_as_of_the_head(graph, *pair) for pair in zip(rows, found, strict=True)]
            report["metric"], scores[name] = next(
                iter(task.score(examples, task.predict(examples, features, given)).values.items())
            )
        report["loss"] = max(0.0, scores["torch"] - scores["onnx"])
    with path.open("rb") as file:
        sync_file(file)
    return report


def write_onnx(graph: Graph, path: Path) -> None:
    """Write a model, in float32, with any number of rows of any length as input.

    The same weights give the same bytes. The file contains no names of source files, which the exporter would leave in it.

    Raises:
        ConfigError: the weights are too large for one file.
    """
    held = sum(parameter.numel() for parameter in graph.parameters()) * 4
    if held > _MOST_BYTES:
        raise ConfigError(
            f"the weights take {held / 2**20:,.0f} MiB, and an ONNX file holds at most {_MOST_BYTES / 2**20:,.0f} MiB",
            hint="leave out --onnx, and serve the model with transformers",
        )
    import onnx
    import onnxscript

    # One tensor each: the same tensor twice would become the same input.
    given = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in graph.inputs)
    with _quiet(), kernels.switched_off(), torch.no_grad():
        program: Any = torch.onnx.export(
            graph,
            given,
            dynamo=True,
            verbose=False,
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            dynamic_shapes=tuple({0: "batch", 1: "length"} for _ in given),
            external_data=False,
        )
        # Without its limits, so that products of weights, such as those of queries, keys and values side by side, are constants.
        onnxscript.optimizer.optimize_ir(program.model, input_size_limit=_MOST_BYTES, output_size_limit=_MOST_BYTES)
        model = program.model_proto
    parts = model.graph
    for part in (parts, *parts.node, *parts.initializer, *parts.input, *parts.output, *parts.value_info):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    onnx.checker.check_model(model)
    write_bytes(path, model.SerializeToString(deterministic=True))


def quantize(source: Path, out: Path, *, per_channel: bool) -> None:
    """Write a copy whose matrices have eight bits, and whose products are computed in integers.

    The inputs of the products are quantized at run time ("dynamic quantization"); LayerNorm, softmax and GELU stay in float32.

    Args:
        per_channel: one scale for each column of a matrix, rather than one for the whole matrix.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(str(source)).graph
    matrices = {each.name for each in graph.initializer if len(each.dims) == 2}
    # Products of two computed matrices, as in attention, would lose more than they gain; those with a vector cannot be quantized.
    others = [node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] not in matrices]
    with _quiet():
        quantize_dynamic(source, out, per_channel=per_channel, weight_type=QuantType.QInt8, nodes_to_exclude=others)


def session(path: Path) -> Runner:
    """An ONNX file in onnxruntime, on the CPU, with as many threads as torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    opened = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in opened.get_outputs()]
    return lambda feed: dict(zip(names, opened.run(None, dict(feed)), strict=True))


def sample_rows(graph: Graph, texts: Sequence[str] | None = None) -> list[Row]:
    """Rows to compare a model and its copies on: some tokens are replaced or masked if a network detects or predicts tokens.

    Args:
        texts: one per row; None: some English sentences, or random tokens if the vocabulary lacks their words.
    """
    special, random = graph.special, np.random.default_rng(_SEED)
    words, pairs = graph.tokenizer.get_vocab_size(), graph.reads_pairs
    encoded = encode_texts(graph.tokenizer, _SENTENCES if texts is None else texts, ids_only=True)
    ids = [np.array(each.ids, np.int64) for each in encoded if each.ids]
    if not ids:
        raise ConfigError(
            "no line of the file has text to compare on", hint="give a file with one text per line: --compare-on FILE"
        )
    if texts is None and np.mean(np.concatenate([*ids, [special.unk]]) == special.unk) > 0.2:
        ids = [random.integers(0, words, length) for length in random.integers(5, 40, len(_SENTENCES))]
    rows = []
    for first, second in zip(ids, [*ids[1:], ids[0]], strict=True):
        room = (graph.max_length - 3) // 2 if pairs else graph.max_length - 2
        first = first[:room].copy()
        if graph.corrupts is not None:
            chosen = random.random(len(first)) < _FRACTION
            chosen[random.integers(len(first))] = True
            first[chosen] = special.mask if graph.corrupts == "mask" else random.integers(0, words, int(chosen.sum()))
        row = np.array([special.cls, *first, special.sep, *([*second[:room], special.sep] if pairs else [])], np.int64)
        rows.append((row, (np.arange(len(row)) > len(first) + 1).astype(np.int64)))
    return rows


def outputs_on(run: Runner, graph: Graph, rows: Sequence[Row]) -> list[Arrays]:
    """The outputs for each row, without those of padding."""
    found: list[Arrays] = []
    for start in range(0, len(rows), _BATCH):
        ids, segments = zip(*rows[start : start + _BATCH], strict=True)
        inputs = {"input_ids": ids, "attention_mask": map(np.ones_like, ids), "token_type_ids": segments}
        padding = {"input_ids": graph.special.pad}
        feed = {
            name: pad_sequence([torch.from_numpy(row) for row in inputs[name]], True, padding.get(name, 0)).numpy()
            for name in graph.inputs
        }
        batch = run(feed)
        for place, row in enumerate(ids):
            found.append(
                {name: each[place, : len(row)] if name in graph.per_token else each[place] for name, each in batch.items()}
            )
    return found


def compare(graph: Graph, rows: Sequence[Row], model: Sequence[Arrays], copy: Sequence[Arrays]) -> dict[str, Any]:
    """Compare the outputs of a copy with those of the model, at the tokens that the model decides about."""
    values: list[tuple[NDArray[Any], NDArray[Any]]] = []
    same: list[NDArray[Any]] = []
    for (ids, segments), one, other in zip(rows, model, copy, strict=True):
        counted: Any
        if graph.decisive[0] not in graph.per_token:
            counted = ...
        elif graph.corrupts == "mask":
            counted = ids == graph.special.mask
        elif isinstance(graph.head, SpanHead):
            counted = (segments == 1) | (np.arange(len(ids)) == 0)
        else:
            counted = (ids != graph.special.cls) & (ids != graph.special.sep)
        pairs = [(one[name][counted], other[name][counted]) for name in graph.decisive]
        values += pairs
        # An answer, which has two outputs, is the same if its start and its end are.
        same.append(np.ravel(np.min([_agreement(graph.decision, *pair) for pair in pairs], axis=0)))
    ours, theirs = (np.concatenate([part.ravel() for part in side]) for side in zip(*values, strict=True))
    largest, spread = float(np.abs(ours - theirs).max()), float(ours.std())
    agreement = float(np.concatenate(same).mean())
    if graph.decision == "number":
        varies = spread > 0 and float(theirs.std()) > 0
        agreement = float(np.corrcoef(ours, theirs)[0, 1]) if varies else float(largest == 0)
    return {"largest_difference": largest, "spread": spread, "agreement": agreement, "decision": graph.decision}


def _agreement(decision: Decision, ours: NDArray[Any], theirs: NDArray[Any]) -> Any:
    """Which of the decisions in an output of a row are the same; of vectors, the cosines."""
    if decision == "vector":
        norms = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
        return np.where(norms > 0, (ours * theirs).sum(-1) / np.maximum(norms, 1e-12), 1.0)
    if decision == "sign":
        return (ours > 0) == (theirs > 0)
    return ours.argmax(-1) == theirs.argmax(-1)


def _as_of_the_head(graph: Graph, row: Row, found: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of a graph for a row, as the head of the task gives them."""
    if isinstance(graph.head, SpanHead):
        segments = torch.from_numpy(row[1])[None]
        allowed = allowed_positions(torch.ones_like(segments, dtype=torch.bool), segments)
        start, end = (torch.from_numpy(found[name])[None] for name in graph.outputs)
        return {name: values[0].numpy() for name, values in graph.head.search(start, end, allowed).items()}
    if graph.decision == "number":
        return {"logits": (found["logits"] - graph._labels.shift) / graph._labels.scale}
    return dict(found)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress library warnings about packages that are not needed and steps that change nothing here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
