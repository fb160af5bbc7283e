"""The data sets of MRQA 2019: JSON lines below a header, one context per line.

The spans of a detected answer are pairs of character positions, `[[start, end], ...]`, where `end` is inclusive.
Reference: Fisch et al. 2019, MRQA 2019 Shared Task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from discern.errors import DataError
from discern.tasks.base import Definition, Prediction
from discern.tasks.examples import QuestionExample, Reading
from discern.tasks.metrics import Scores
from discern.tasks.metrics.answers import mrqa_scores
from discern.tasks.questions import Questions
from discern.tasks.readers.answers import QuestionCollector
from discern.tasks.readers.files import clean_text, numbered_lines, parsed_json
from discern.tasks.squad import DEFAULTS, QuestionSource, answers_by_id

MRQA_FILES: dict[str, tuple[str, ...]] = {split: (f"{split}.jsonl", f"{split}.jsonl.gz") for split in ("train", "dev", "test")}
_SHAPE = (
    'expected on each line: {"context": ..., "qas": [{"qid": ..., "question": ..., "answers": [...], '
    '"detected_answers": [{"text": ..., "char_spans": [[start, end]]}]}]}'
)


def read_mrqa(path: Path, *, keep_unfound: bool = False, labeled: bool = True) -> Reading[QuestionExample]:
    """The questions of a file in MRQA's format, compressed or not.

    The answers are all spans of the detected answers, in their order; the golds are the texts of `answers`, which the official
    metric compares with. The header line may be missing.

    Args:
        keep_unfound, labeled: see `read_squad`.

    Raises:
        DataError: the file is not JSON lines or not in this format, or two questions have the same id.
    """
    collector = QuestionCollector(keep_unfound)
    seen: set[str] = set()
    notes: tuple[str, ...] = ()
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        record = parsed_json(line, where)
        if not isinstance(record, dict):
            raise DataError(f"{where}: not a JSON object", hint=_SHAPE)
        if "header" in record and "context" not in record:
            header = record["header"]
            dataset, split = (header.get("dataset"), header.get("split")) if isinstance(header, dict) else (None, None)
            notes = (f"data set {dataset}, split {split}",)
            continue
        context = _text(record, "context", where)
        for question in _list(record, "qas", where):
            identity = str(question.get("qid", question.get("id", ""))) if isinstance(question, dict) else ""
            if not identity:
                raise DataError(f"{where}: a question without 'qid'", hint=_SHAPE)
            if identity in seen:
                raise DataError(
                    f"{where}: question {identity} occurs twice",
                    hint="give every question a unique qid, by which predictions are matched",
                )
            seen.add(identity)
            if not labeled:
                question = {key: value for key, value in question.items() if key not in ("answers", "detected_answers")}
            _add(collector, question, context, identity, where)
    if not collector.examples:
        shown = "; ".join(str(problem) for problem in collector.problems.summary())
        raise DataError(f"{path} has no usable questions{': ' + shown if shown else ''}", hint=_SHAPE)
    return Reading(tuple(collector.examples), str(path), collector.problems.summary(), notes)


def _add(collector: QuestionCollector, question: dict[str, Any], context: str, identity: str, where: str) -> None:
    for key in ("answers", "detected_answers"):
        if not isinstance(question.get(key) or [], list):
            raise DataError(f"{where}: '{key}' is not a list", hint=_SHAPE)
    known = "answers" in question or "detected_answers" in question
    golds = tuple(clean_text(str(text)) for text in question.get("answers") or ())
    detected = list(_detected(question.get("detected_answers") or [], context, where))
    if not golds:
        golds = tuple(dict.fromkeys(text for text, _ in detected))
    pairs = detected or [(text, None) for text in golds]
    example = QuestionExample(
        identity, _text(question, "question", where), context, golds=golds, impossible=False if known else None
    )
    collector.add(example, pairs, where)


def _detected(answers: Any, context: str, where: str) -> Iterator[tuple[str, int | None]]:
    """Text and start of each span of each detected answer."""
    for answer in answers:
        if not isinstance(answer, dict) or "text" not in answer:
            raise DataError(f"{where}: a detected answer without 'text'", hint=_SHAPE)
        text = clean_text(str(answer["text"]))
        spans = answer.get("char_spans") or []
        if not isinstance(spans, list):
            raise DataError(f"{where}: 'char_spans' is {spans!r:.60}, expected a list", hint=_SHAPE)
        for span in spans:
            if not (isinstance(span, list) and len(span) == 2 and all(isinstance(place, int) for place in span)):
                raise DataError(f"{where}: a char_span is not a pair of numbers: {span!r:.60}", hint=_SHAPE)
            start, last = span
            # The span is more reliable than the text, which differs in white space or case in some data sets.
            held = context[start : last + 1] if 0 <= start <= last < len(context) else ""
            yield (held if held.split() == text.split() or held.casefold() == text.casefold() else text), start
        if not spans:
            yield text, None


def _list(record: dict[str, Any], name: str, where: str) -> list[Any]:
    value = record.get(name)
    if not isinstance(value, list):
        raise DataError(f"{where}: no list '{name}'; it has: {', '.join(record)[:200] or 'nothing'}", hint=_SHAPE)
    return value


def _text(record: dict[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: '{name}' is missing, empty or not a text", hint=_SHAPE)
    return clean_text(value)


@final
class MrqaQuestions(Questions):
    """Every question has an answer; scored as MRQA 2019."""

    family: ClassVar[str] = "mrqa"

    def measure(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        return mrqa_scores(examples, answers_by_id(predictions))


def _mrqa(name: str, published: str) -> Definition[QuestionExample]:
    """A data set of MRQA, in files named `train.jsonl` and `dev.jsonl`, or by the published names."""
    files = {
        split: (*names, f"{split}/{published}.jsonl.gz", f"{split}/{published}.jsonl") for split, names in MRQA_FILES.items()
    }
    return Definition(name, MrqaQuestions, QuestionSource(read_mrqa, files), ("f1", "exact_match"), defaults=DEFAULTS)


NEWSQA = _mrqa("newsqa", "NewsQA")
NATURALQS = _mrqa("naturalqs", "NaturalQuestionsShort")
TRIVIAQA = _mrqa("triviaqa", "TriviaQA-web")
SEARCHQA = _mrqa("searchqa", "SearchQA")
HOTPOTQA = _mrqa("hotpotqa", "HotpotQA")
SQUAD_MRQA = _mrqa("squad-mrqa", "SQuAD")
