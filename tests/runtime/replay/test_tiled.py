"""Which token of a small profile each token of a large one repeats."""

from __future__ import annotations

import numpy as np

from wanrun.replay.tiled import Tiling

TILING = Tiling(patch=(2, 1), small=(2, 3), large=(4, 6), frames=2)
"""Six tokens of a frame, each of two cells, and twenty-four: each is repeated four times, side by side."""


def test_each_token_is_repeated_in_a_run() -> None:
    cells = np.arange(24.0).reshape(2, 4, 3)
    repeated = TILING.cells(cells)
    assert repeated.shape == (2, 8, 6) and repeated.flags.c_contiguous
    for number in range(24):
        (row, column), (own_row, own_column) = divmod(number, 6), divmod(number // 4, 3)
        found = repeated[:, 2 * row : 2 * row + 2, column]
        assert np.array_equal(found, cells[:, 2 * own_row : 2 * own_row + 2, own_column])


def test_tables_are_those_of_the_far_corner() -> None:
    """Behind the tokens of all frames there is a mesh's padding, which stays."""
    places = [(frame, row, column) for frame in range(2) for row in range(4) for column in range(6)]
    table = np.array([*places, (9, 9, 9)])
    found = TILING.table(table)
    for token, (frame, row, column) in enumerate(places):
        own_row, own_column = divmod((row * 6 + column) // 4, 3)
        assert tuple(found[token]) == (frame, own_row + 2, own_column + 3)
    assert tuple(found[-1]) == (9, 9, 9)


def test_attention_does_not_tell_repeated_tokens_from_single_ones() -> None:
    """The reason for all of this, with one head and rotary tables of distances."""
    rng = np.random.default_rng(0)

    def attend(tokens: np.ndarray, angles: np.ndarray) -> np.ndarray:
        turned = tokens[:, 0] + 1j * tokens[:, 1]
        scores = np.real(np.outer(turned * np.exp(1j * angles), np.conj(turned * np.exp(1j * angles))))
        weights = np.exp(scores)
        return weights @ tokens / weights.sum(axis=1, keepdims=True)

    cells = rng.standard_normal((2, 2, 4, 3))  # two numbers of each token, frames, rows and columns
    one_frame = Tiling(patch=(2, 1), small=(2, 3), large=(4, 6), frames=1)
    small = cells[:, 0, ::2].reshape(2, 6).T
    large = one_frame.cells(cells)[:, 0, ::2].reshape(2, 24).T
    rows, columns = np.divmod(np.arange(24), 6)
    angles = 0.3 * rows + 0.7 * columns
    own = angles.reshape(4, 6)[:2, :3].ravel()
    found = attend(large, one_frame.table(angles))
    expected = attend(small, own)[np.arange(24) // 4]
    assert np.allclose(found, expected, rtol=0, atol=1e-12) and np.ptp(expected) > 0.1
