"""Few shapes of the many that bench tries: nothing is compiled after the warm-up, and every forecast is eager's."""

import pytest

pytest.importorskip("torch")

from toto_compat.bench.shapes import Asked, Found, run, shapes_of

pytestmark = pytest.mark.cell


def test_every_shape_within_the_announced_maxima_is_forecast_without_another_compilation() -> None:
    asked = Asked(context=(64, 256), horizon=(1, 70), batch=(1, 8), batch_sizes=(1, 8), drawn=4)
    found = run(asked)
    assert found.shapes == 8 + 4
    assert found.compilations_in_warm_up == 4  # one pass, a step for each batch, draws
    assert (found.compilations, found.graph_breaks) == (0, 0)
    assert found.error_over_allowed <= 1


def test_the_corners_come_first_and_drawn_shapes_lie_between_them() -> None:
    shapes = shapes_of(Asked(drawn=60), 32)
    assert (shapes[0], shapes[7]) == ((4096, 336, 512), (64, 1, 1))
    assert len(shapes) >= 8 + 55
    assert all(context % 32 == 0 and 64 <= context <= 4096 for context, _, _ in shapes)
    assert {1, 512} <= {batch for _, _, batch in shapes}


def test_an_error_is_held_against_eagers_own() -> None:
    counted = {"shapes": 1, "announced": (1,), "compilations_in_warm_up": 1, "compilations": 0, "graph_breaks": 0}
    where = {"torch": "2.13.0", "python": "3.11", "model": "tiny", "autocast": None}
    found = Found.model_validate({**where, **counted, "error": 3e-7, "eager_error": 1e-7, "nudged": 5e-8})
    assert found.error_over_allowed == pytest.approx(1.5)
