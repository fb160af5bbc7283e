"""What the graph of a model computes: token ids to logits, states or vectors, as one module that `torch.onnx.export` traces."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn

from discern.artifacts.huggingface import HuggingFaceFolder
from discern.artifacts.task_model import TaskModel
from discern.convert.sentence_transformers import VectorPooling
from discern.data.tokenizer import special_tokens
from discern.errors import ConfigError
from discern.interop.families import family_of_type
from discern.models.base import Encoder, Network
from discern.models.heads import TokenHead
from discern.tasks.answer_heads import JointHead, SpanHead
from discern.tasks.base import Labels, TaskHead
from discern.tasks.classification import ClassificationHead
from discern.tasks.features import TaskRows
from discern.tasks.pairs import mean_state
from discern.tasks.tagging import TaggingHead
from discern.types import SpecialTokens, TokenBatch

Outputs: TypeAlias = dict[str, Tensor]
Decision: TypeAlias = Literal["sign", "class", "signs", "token class", "span", "number", "vector"]
"""What a model decides, by which its copies are compared. 'sign': of one logit per token; 'class': the largest of a row;
'signs': of several logits per row; 'token class': the largest of a token; 'span': the likeliest start and end; 'number' and
'vector' decide nothing, so that they are compared by correlation and by cosine."""


class Graph(nn.Module, abc.ABC):
    """One model as a function of tensors.

    Attributes:
        outputs: names of its outputs, in order.
        decision: how its copies are compared.
        decisive: the outputs by which they are.
        per_token: the outputs of every token, (B, L, ...).
        has_segments: whether it reads `token_type_ids`.
    """

    outputs: tuple[str, ...]
    decision: Decision
    decisive: tuple[str, ...]
    per_token: frozenset[str]
    has_segments: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs, each (B, L) and int64, in order; as in transformers."""
        return ("input_ids", "attention_mask", *(("token_type_ids",) if self.has_segments else ()))

    @abc.abstractmethod
    def compute(self, input_ids: Int[Tensor, "B L"], real: Bool[Tensor, "B L"], segments: Int[Tensor, "B L"]) -> Outputs:
        """The outputs by name."""

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None = None,
    ) -> tuple[Tensor, ...]:
        """The outputs in order; those of padding are undefined.

        Args:
            attention_mask: 1 = real token, 0 = padding.
            token_type_ids: segments; None: all 0.
        """
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        found = self.compute(input_ids, attention_mask != 0, segments)
        return tuple(found[name] for name in self.outputs)


class PretrainedGraph(Graph):
    """A pre-training head at every position, and the states that it reads."""

    outputs = ("logits", "last_hidden_state")
    decisive = ("logits",)
    per_token = frozenset(outputs)

    def __init__(self, network: Network, *, has_segments: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for part in (network.encoder, network.head, network.bilinear) if part is not None)
        self.network = network
        self.has_segments = has_segments
        self.decision: Decision = "sign" if isinstance(network.head, TokenHead) else "token class"

    def compute(self, input_ids: Int[Tensor, "B L"], real: Bool[Tensor, "B L"], segments: Int[Tensor, "B L"]) -> Outputs:
        hidden = self.network.encoder(input_ids, real, segments)
        return {"logits": self.network.logits_of(hidden, input_ids), "last_hidden_state": hidden}


class VectorGraph(Graph):
    """The states of an encoder, and a vector for each text unless `pooling` is None."""

    decision: Decision = "vector"
    per_token = frozenset({"last_hidden_state"})

    def __init__(
        self,
        encoder: Encoder,
        special: SpecialTokens,
        *,
        pooling: VectorPooling | None = None,
        normalize: bool = False,
        has_segments: bool,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.frame = (special.cls, special.sep)
        self.pooling = pooling
        self.normalize = normalize
        self.has_segments = has_segments
        # The states come first, where servers that pool themselves look for them.
        self.outputs = ("last_hidden_state", "sentence_embedding") if pooling else ("last_hidden_state",)
        self.decisive = self.outputs[-1:]

    def compute(self, input_ids: Int[Tensor, "B L"], real: Bool[Tensor, "B L"], segments: Int[Tensor, "B L"]) -> Outputs:
        hidden = self.encoder(input_ids, real, segments)
        found = {"last_hidden_state": hidden}
        if self.pooling is not None:
            vectors = hidden[:, 0] if self.pooling == "cls" else mean_state(hidden, self._counted(input_ids, real))
            found["sentence_embedding"] = nn.functional.normalize(vectors, dim=-1) if self.normalize else vectors
        return found

    def _counted(self, input_ids: Int[Tensor, "B L"], real: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
        if self.pooling == "mean":
            for token in self.frame:
                real = real & (input_ids != token)
        return real


class TaskGraph(Graph):
    """The head of a fine-tuned model. Outputs are named and scaled as in transformers."""

    def __init__(self, encoder: Encoder, head: TaskHead, labels: Labels, *, has_segments: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.labels = labels
        self.has_segments = has_segments
        self.outputs = ("start_logits", "end_logits") if isinstance(head, SpanHead) else ("logits",)
        kinds: dict[str, Decision] = {"multi": "signs", "number": "number", "tags": "token class", "spans": "span"}
        self.decision = kinds.get(labels.kind, "class")
        self.decisive = self.outputs
        self.per_token = frozenset(self.outputs if self.decision in ("token class", "span") else ())

    def compute(self, input_ids: Int[Tensor, "B L"], real: Bool[Tensor, "B L"], segments: Int[Tensor, "B L"]) -> Outputs:
        hidden = self.encoder(input_ids, real, segments)
        if isinstance(self.head, SpanHead):
            states = hidden if self.head.inner is None else self.head.inner(hidden)
            start, end = self.head.output(states).unbind(-1)
            return {"start_logits": start, "end_logits": end}
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
        states = self.head.inputs(hidden, self.encoder, input_ids)
        _, found = self.head(states, tokens, TaskRows("", everything, everything, {}))
        logits: Float[Tensor, "..."] = found["logits"]
        if self.labels.kind == "number":
            logits = logits * self.labels.scale + self.labels.shift
        return {"logits": logits}


@dataclass(frozen=True, eq=False)
class Served:
    """A model of a folder, to be written as a graph.

    Attributes:
        graph: what it computes, in evaluation mode.
        max_length: number of tokens that it was trained to read.
        corrupts: what a comparison does with some tokens so that the model has something to decide: 'replace' or 'mask' them;
            None: nothing.
        task_model: the fine-tuned model; None for other models.
    """

    graph: Graph
    tokenizer: Tokenizer
    special: SpecialTokens
    max_length: int
    corrupts: Literal["replace", "mask"] | None = None
    task_model: TaskModel | None = None

    @property
    def reads_pairs(self) -> bool:
        """Whether its rows are pairs of texts."""
        return isinstance(self.graph, TaskGraph) and (self.graph.labels.pairs or self.graph.decision == "span")


def graph_of(folder: Path, *, pooling: VectorPooling | None = None, normalize: bool = False) -> Served:
    """The graph of the model in a folder that discern exported.

    Args:
        folder: a network, an encoder, or a fine-tuned model.
        pooling: give the vectors of texts instead of what the head computes; None: give that, or without a head the states.
        normalize: scale the vectors to length 1.

    Raises:
        ConfigError: the model has no graph, with the reason.
        CheckpointError: the weights are missing or damaged.
    """
    opened = HuggingFaceFolder(folder)
    model_type = opened.config_json["model_type"]
    check_graph(model_type)
    has_segments = family_of_type(model_type).has_segments
    special = special_tokens(opened.tokenizer)
    graph: Graph
    tuned: TaskModel | None = None
    corrupts: Literal["replace", "mask"] | None = None
    if opened.has_task_head and pooling is None:
        tuned = opened.task_model()
        task = tuned.task()
        head: Any = tuned.objective.heads[task.name]
        check_head(head)
        compares = isinstance(head, ClassificationHead) and head.pooling == "pair"
        graph = TaskGraph(tuned.objective.encoder, head, task.labels, has_segments=has_segments or compares)
        length = task.config.sequence_length
    elif pooling is None and ("networks" in opened.mark or opened.config_json["architectures"][0].endswith("MaskedLM")):
        (network,) = opened.networks(beside=False).values()
        graph, length = PretrainedGraph(network, has_segments=has_segments), opened.max_length
        corrupts = "replace" if graph.decision == "sign" else "mask"
    else:
        loaded = opened.encoder
        graph = VectorGraph(loaded.encoder, special, pooling=pooling, normalize=normalize, has_segments=has_segments)
        length = loaded.max_length
    return Served(graph.eval(), opened.tokenizer, special, length, corrupts, tuned)


def check_graph(model_type: str) -> None:
    """Raise a ConfigError if the models of this type in config.json have no graph."""
    if model_type == "xlnet":
        raise ConfigError(
            "an XLNet cannot be exported to ONNX: its attention is relative to the positions of each row, it reads padding on "
            "the left, and its head predicts from a second stream, which depends on the order that is asked for",
            hint="leave out --onnx, and serve it with transformers; encoders 'bert' and 'modernbert' can be exported to ONNX",
        )


def check_head(head: nn.Module) -> None:
    """Raise a ConfigError if the head of a task has no graph."""
    if type(head) not in (ClassificationHead, TaggingHead, SpanHead):
        searches = ": the end of an answer depends on its start, which takes a search" if isinstance(head, JointHead) else ""
        raise ConfigError(
            f"a head of the class {type(head).__name__} cannot be exported to ONNX{searches}",
            hint="leave out --onnx; for questions, fine-tune with --set task.head=span",
        )
