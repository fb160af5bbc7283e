import pytest

from discern.objectives.rtd import check_points, factor_at


def test_no_points_mean_one_throughout() -> None:
    assert [factor_at((), step) for step in (0, 7, 10**9)] == [1.0, 1.0, 1.0]


def test_lines_run_between_the_points_and_level_outside() -> None:
    points = ((10, 0.0), (20, 1.0), (40, 0.5))
    assert [factor_at(points, step) for step in (0, 10, 15, 20, 30, 40, 99)] == [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.5]


def test_a_step_from_one_to_zero_stops_a_loss() -> None:
    assert [factor_at(((999, 1.0), (1000, 0.0)), step) for step in (0, 999, 1000, 1001)] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("points", "says"), [(((5, 1.0), (5, 0.0)), "larger"), (((-1, 1.0),), "at least 0"), (((0, -1.0),), "negative")]
)
def test_points_that_make_no_schedule_are_refused(points: tuple[tuple[int, float], ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_points("generator_weight_schedule", points)
