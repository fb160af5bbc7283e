"""A text cut at its tokens, to shade each by the probability that it was replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ShadedText:
    """A text and what was said of its tokens.

    Attributes:
        offsets: (start, end) of each token in the text, in characters, in order.
        probabilities: of each token, in 0-1.
    """

    text: str
    offsets: Sequence[tuple[int, int]]
    probabilities: Sequence[float]


@dataclass(frozen=True)
class Piece:
    """Some characters in a row.

    Attributes:
        probability: of the token they belong to; None between tokens.
        token: number of that token in the text; None between tokens.
    """

    text: str
    probability: float | None
    token: int | None = field(default=None, compare=False)

    @property
    def hint(self) -> str:
        """What to say of it when it is pointed at."""
        return "" if self.probability is None else f"{self.probability:.3f}"

    @property
    def is_flagged(self) -> bool:
        """Whether the discriminator takes it for replaced."""
        return self.probability is not None and self.probability > 0.5


def cut(shaded: ShadedText) -> list[Piece]:
    """The whole text in pieces. Of tokens that share a character, as bytes of one do, the likelier replaced counts."""
    pieces: list[Piece] = []
    done = 0
    for number, ((start, end), probability) in enumerate(zip(shaded.offsets, shaded.probabilities, strict=True)):
        if end <= done:
            last = pieces[-1] if pieces else None
            if last is not None and start < end and last.probability is not None and last.probability < probability:
                pieces[-1] = Piece(last.text, probability, number)
            continue
        if start > done:
            pieces.append(Piece(shaded.text[done:start], None))
        pieces.append(Piece(shaded.text[max(start, done) : end], probability, number))
        done = end
    if done < len(shaded.text):
        pieces.append(Piece(shaded.text[done:], None))
    return pieces
