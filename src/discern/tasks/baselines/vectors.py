"""The baseline for text embeddings: TF-IDF of their words and characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, final

from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer

from discern.tasks.base import Prediction
from discern.tasks.baselines.base import Baseline
from discern.tasks.examples import TextGroup

if TYPE_CHECKING:
    from discern.tasks.contrastive import Contrastive

_FEATURES = 100_000


@final
class TfIdfVectors(Baseline[TextGroup]):
    """TF-IDF of words and of character n-grams, compared by their cosines; fitted on the training texts.

    Args:
        task: compares the vectors as those of the network.
    """

    name: ClassVar[str] = "tfidf"
    title = "TF-IDF vectors"

    def __init__(self, task: Contrastive) -> None:
        self._task = task

    def predict(self, train: Sequence[TextGroup], examples: Sequence[TextGroup]) -> list[Prediction] | None:
        fitted = []
        for part in (
            TfidfVectorizer(token_pattern=r"(?u)\b\w+\b", sublinear_tf=True, max_features=_FEATURES),
            TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True, max_features=_FEATURES),
        ):
            try:
                fitted.append(part.fit([text for example in train for text in example.texts]))
            except ValueError:  # "empty vocabulary": texts of punctuation only have no words
                continue
        if not fitted:
            return None
        texts = [text for example in examples for text in example.texts]
        table = sparse.csr_array(sparse.hstack([part.transform(texts) for part in fitted], format="csr"))
        rows = (table[number : number + 1] for number in range(table.shape[0]))
        return self._task.compare(examples, [[next(rows) for _ in example.texts] for example in examples])
