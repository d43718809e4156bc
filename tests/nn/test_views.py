"""A view that asks for all columns where a rank has some of them."""

from __future__ import annotations

import pytest
import torch

from echelon.nn.views import LocalWidthViews, fit_to_local_width


@pytest.mark.parametrize(
    ("shape", "asked", "fitted"),
    [
        ((2, 5, 2, 4), (2, 5, 16), [2, 5, 8]),  # heads put together
        ((2, 5, 8), (2, 5, 4, 4), [2, 5, 2, 4]),  # taken apart: heads, not their width
        ((2, 16, 2, 4), (2, 16, 16), [2, 16, 8]),  # as many positions as columns
        ((2, 5, 2, 4), (10, 16), [10, 8]),
        ((2, 5, 16), (2, 5, 4, 4), None),  # all are there
        ((2, 5, 8), (2, 5, -1), None),
        ((2, 5, 8), (2, 5, 9), None),  # a mistake of the model's own
    ],
)
def test_one_size_is_reduced(shape: tuple[int, ...], asked: tuple[int, ...], fitted: list[int] | None) -> None:
    assert fit_to_local_width(shape, asked, 16, 8) == fitted


def test_views_inside_are_fitted_and_mistakes_still_fail() -> None:
    x = torch.arange(80.0).view(2, 5, 2, 4)
    with LocalWidthViews(16, 8):
        assert x.view(2, 5, 16).shape == x.reshape((2, 5, 16)).shape == torch.reshape(x, (2, 5, 16)).shape == (2, 5, 8)
        assert x.view(torch.int32).shape == x.shape
        with pytest.raises(RuntimeError, match="invalid for input of size 80"):
            x.view(2, 5, 9)
    with pytest.raises(RuntimeError, match="invalid for input of size 80"):
        x.view(2, 5, 16)
