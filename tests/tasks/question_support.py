"""Questions, a tokenizer and a network, all small."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import numpy as np
import torch

from discern.data.tokenizer import bert_wordpiece, prepared, special_tokens
from discern.models.base import Encoder, build_encoder
from discern.models.config import build_config
from discern.models.embeddings import Embeddings
from discern.models.initialization import initialize
from discern.tasks.base import TextEncoder
from discern.tasks.examples import Answer, QuestionExample
from discern.tasks.features import TaskRows
from discern.types import TokenBatch

MODEL = build_config(
    num_layers=1, hidden_size=32, embedding_size=16, num_heads=2, feedforward_size=64, hidden_dropout=0.0, attention_dropout=0.0
)


def text_encoder(*texts: str, words: Iterable[str] = (), lowercase: bool = True) -> TextEncoder:
    """A tokenizer that knows `words`, and otherwise cuts these texts into characters."""
    normal = unicodedata.normalize("NFD", "".join(texts))
    characters = sorted({each for each in normal + normal.lower() if not each.isspace()})
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *characters, *(f"##{each}" for each in characters)]
    vocabulary = {entry: number for number, entry in enumerate(dict.fromkeys(entries))}
    tokenizer = prepared(bert_wordpiece(vocabulary, lowercase), "small")
    return TextEncoder(tokenizer, special_tokens(tokenizer))


def ask(identity: str, question: str, context: str, *answers: str, impossible: bool | None = False) -> QuestionExample:
    """A question with answers that stand in its context, where they first do."""
    found = tuple(Answer(answer, context.index(answer)) for answer in answers)
    return QuestionExample(identity, question, context, found, answers, impossible)


def small_encoder(rows: int, seed: int = 0) -> Encoder:
    """A network of one block over a vocabulary, in training mode."""
    encoder = build_encoder(Embeddings(rows, MODEL.embedding_size, MODEL), MODEL)
    initialize(encoder, torch.Generator().manual_seed(seed), MODEL)
    return encoder


def question_batch(questions: list[int], windows: list[int]) -> TokenBatch:
    """Rows of [CLS] question [SEP] window [SEP] with as many tokens as said; what they are does not matter."""
    lengths = np.array(questions) + np.array(windows) + 3
    length, count = int(lengths.max()), len(lengths)
    places = torch.arange(length).expand(count, length)
    attention = places < torch.tensor(lengths)[:, None]
    types = (attention & (places >= torch.tensor(questions)[:, None] + 2)).long()
    return TokenBatch(
        input_ids=torch.where(attention, 5, 0),
        attention_mask=attention,
        special_tokens_mask=~attention,
        token_type_ids=types,
        position_ids=places,
        document_ids=None,
        word_starts=None,
        example_index=torch.arange(count),
        slot=torch.arange(count),
        full=bool(attention.all()),
    )


def task_rows(count: int, **targets: torch.Tensor) -> TaskRows:
    """Rows of one task, all of a batch."""
    return TaskRows("task", torch.arange(count), torch.arange(count), targets)
