import pytest

from discern.report.page import ShadedPiece, ShadedText, shaded_pieces


@pytest.mark.parametrize(
    ("text", "offsets", "probabilities", "pieces"),
    [
        ("ab c", [(0, 2), (3, 4)], [0.1, 0.9], [ShadedPiece("ab", 0.1), ShadedPiece(" ", None), ShadedPiece("c", 0.9)]),
        (" a.", [(1, 2)], [0.5], [ShadedPiece(" ", None), ShadedPiece("a", 0.5), ShadedPiece(".", None)]),
        ("é", [(0, 1), (0, 1)], [0.2, 0.7], [ShadedPiece("é", 0.7)]),
        ("abc", [(0, 2), (1, 3)], [0.2, 0.7], [ShadedPiece("ab", 0.2), ShadedPiece("c", 0.7)]),
        ("ab", [(0, 0), (0, 2)], [0.2, 0.7], [ShadedPiece("ab", 0.7)]),
        ("", [], [], []),
        ("nothing", [], [], [ShadedPiece("nothing", None)]),
    ],
)
def test_shaded_pieces(text: str, offsets: list[tuple[int, int]], probabilities: list[float], pieces: list[ShadedPiece]) -> None:
    found = shaded_pieces(ShadedText(text, offsets, probabilities))
    assert found == pieces
    assert "".join(piece.text for piece in found) == text


def test_one_half_is_not_marked() -> None:
    assert not ShadedPiece("a", 0.5).is_marked
    assert ShadedPiece("a", 0.51).is_marked
    assert not ShadedPiece("a", None).is_marked
