"""Locates answers in their contexts, for all formats of questions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from discern.data.sources.problems import ProblemLog
from discern.tasks.examples import Answer, QuestionExample

NOT_FOUND = "answer that does not occur in its context, left out"
ELSEWHERE = "answer found elsewhere than at its start"
NO_ANSWER_LEFT = "question without an answer that occurs in its context, left out"


def locate(context: str, text: str, start: int | None = None) -> Answer | None:
    """Locate an answer in its context: at `start`, or else nearest to it; without a start, its first occurrence.

    If it is not found, it is searched for without leading and trailing white space. None if the context does not contain it.
    """
    for wanted in (text, text.strip()):
        if not wanted:
            continue
        if start is None:
            place = context.find(wanted)
        elif start >= 0 and context.startswith(wanted, start):
            place = start
        else:
            places = (context.rfind(wanted, 0, max(start, 0) + len(wanted)), context.find(wanted, max(start, 0)))
            place = min((found for found in places if found >= 0), key=lambda found: abs(found - start), default=-1)
        if place >= 0:
            return Answer(wanted, place)
    return None


@dataclass(slots=True)
class QuestionCollector:
    """Collects questions and locates their answers; questions that cannot be trained on are left out and counted.

    Args:
        keep_unfound: keep questions without an answer that occurs in the context, since the metric counts them.
    """

    keep_unfound: bool
    problems: ProblemLog = field(default_factory=ProblemLog)
    examples: list[QuestionExample] = field(default_factory=list)

    def add(
        self,
        question: QuestionExample,
        answers: Iterable[tuple[str, int | None]],
        where: str,
    ) -> None:
        """Add a question, and locate its `answers`, given as text and expected start.

        The golds are the texts of the answers, unless the question has golds already.
        """
        pairs = list(answers)
        found: dict[Answer, None] = {}
        for text, start in pairs:
            answer = locate(question.context, text, start)
            if answer is None:
                self.problems.add(NOT_FOUND, f"{where} question {question.id}: {text[:40]!r}")
                continue
            if start is not None and answer.start != start:
                self.problems.add(ELSEWHERE, f"{where} question {question.id}: {text[:40]!r} at {answer.start}, not {start}")
            found[answer] = None
        golds = question.golds or tuple(text for text, _ in pairs)
        if golds and not found and not question.impossible and not self.keep_unfound:
            self.problems.add(NO_ANSWER_LEFT, f"{where} question {question.id}")
            return
        self.examples.append(
            QuestionExample(question.id, question.question, question.context, tuple(found), golds, question.impossible)
        )
