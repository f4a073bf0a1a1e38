"""A group of one rank, by gloo: what it gives, and what it says when it was left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hypocenter.base.errors import DeviceFault
from hypocenter.base.tensor import Tensor
from hypocenter.device.group import Group
from hypocenter.device.launch import Launch


class Sums:
    """Sums by launches, of which there are none."""

    is_let_go = False

    def launch(self, x: Tensor) -> Launch | None:
        return None

    def let_go(self) -> None:
        self.is_let_go = True


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(0, 1, str(tmp_path / "meeting"), "sim:h200")
    yield group
    group.close()


def test_what_ranks_give_is_told_to_all(group: Group) -> None:
    assert group.swap(b"\x00\xffab") == (b"\x00\xffab",)
    assert (group.agrees(True), group.agrees(False)) == (True, False)


def test_closing_lets_waits_go(group: Group) -> None:
    sums = Sums()
    group.add_by(sums)
    assert not sums.is_let_go
    group.close()
    assert sums.is_let_go


def test_sums_of_a_group_that_was_left_wait_for_nobody(group: Group) -> None:
    """As where a rank dies while the other one opens them."""
    group.close()
    sums = Sums()
    group.add_by(sums)
    assert sums.is_let_go


def test_a_group_that_was_left_says_so(group: Group) -> None:
    group.close()
    with pytest.raises(DeviceFault):
        group.swap(b"a")
    with pytest.raises(DeviceFault):
        group.agrees(True)
