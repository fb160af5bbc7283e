import pytest

from discern.report.shading import Piece, ShadedText, cut


@pytest.mark.parametrize(
    ("text", "offsets", "probabilities", "pieces"),
    [
        ("ab c", [(0, 2), (3, 4)], [0.1, 0.9], [Piece("ab", 0.1), Piece(" ", None), Piece("c", 0.9)]),
        (" a.", [(1, 2)], [0.5], [Piece(" ", None), Piece("a", 0.5), Piece(".", None)]),
        ("é", [(0, 1), (0, 1)], [0.2, 0.7], [Piece("é", 0.7)]),
        ("abc", [(0, 2), (1, 3)], [0.2, 0.7], [Piece("ab", 0.2), Piece("c", 0.7)]),
        ("ab", [(0, 0), (0, 2)], [0.2, 0.7], [Piece("ab", 0.7)]),
        ("", [], [], []),
        ("nothing", [], [], [Piece("nothing", None)]),
    ],
)
def test_cut(text: str, offsets: list[tuple[int, int]], probabilities: list[float], pieces: list[Piece]) -> None:
    found = cut(ShadedText(text, offsets, probabilities))
    assert found == pieces
    assert "".join(piece.text for piece in found) == text


def test_one_half_is_not_flagged() -> None:
    assert not Piece("a", 0.5).is_flagged
    assert Piece("a", 0.51).is_flagged
    assert not Piece("a", None).is_flagged
