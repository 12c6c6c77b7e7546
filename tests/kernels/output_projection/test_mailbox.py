"""The mailbox's layout, its sentinel and its error word."""

from __future__ import annotations

import pytest
import torch

from k3fuse.kernels.common.mailbox import (
    ALIGNMENT,
    HIDDEN,
    MAX_M,
    PARITIES,
    PRODUCERS,
    SENTINEL,
    ErrorWord,
    Mailbox,
)


@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("max_m", [1, 64])
def test_regions_are_aligned_and_apart(tp: int, max_m: int) -> None:
    box = Mailbox(tp, max_m=max_m)
    row = 2 * HIDDEN
    assert (box.row, box.part) == (row, row // tp)
    ends = {
        box.one_shot: PARITIES * tp * max_m * row,
        box.receive: PARITIES * max_m * row,
        box.gather: PARITIES * max_m * row,
        box.control: PRODUCERS * 4,
        box.error: 4,
    }
    end = 0
    for start, size in ends.items():
        assert start == end
        assert start % 16 == 0
        end = start + size
    assert end <= box.total < end + ALIGNMENT
    assert box.data == box.control


def test_rows_of_the_slots_tile_them() -> None:
    box = Mailbox(4, max_m=3)
    places = [box.slot(p, r, t) for p in range(PARITIES) for r in range(4) for t in range(3)]
    assert places == list(range(0, box.receive, box.row))


def test_the_size_at_tp16_is_what_the_page_says() -> None:
    # 2 parities x 64 rows x 14,336 bytes x (16 slots + 1 received row + 1 gathered row).
    assert Mailbox(16).data == 2 * MAX_M * 14_336 * 18


def test_a_group_that_does_not_divide_the_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tp=3: the 7168 columns must divide"):
        Mailbox(3)


def test_the_sentinel_is_a_pair_with_minus_zero() -> None:
    pair = torch.tensor([0.0, -0.0], dtype=torch.bfloat16).view(torch.int32)
    assert int(pair) & 0xFFFFFFFF == SENTINEL


@pytest.mark.parametrize(("token", "slot"), [(0, 0), (63, 15), (7, ErrorWord.GATHER)])
def test_the_error_word_tells_token_and_slot(token: int, slot: int) -> None:
    word = ErrorWord(token, slot)
    assert word.word != 0
    assert ErrorWord.of(word.word) == word
    assert f"token {token}" in word.sentence()


def test_no_error_is_no_word() -> None:
    assert ErrorWord.of(0) is None
