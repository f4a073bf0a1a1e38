"""Addresses that a program asked for: told once their memory is gone, and not before."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from hypocenter.foreign import asked_hooks  # noqa: E402
from hypocenter.foreign.asked_addresses import AskedAddresses  # noqa: E402
from hypocenter.foreign.asked_hooks import watch_asked  # noqa: E402
from hypocenter.record.events import Values  # noqa: E402


def table(*addresses: int, dtype: str = "I64") -> Values:
    held = np.array(addresses, np.int64)
    return Values(1, dtype, (len(addresses), 1), held.tobytes())


def asked_of(*tensors: Any) -> tuple[AskedAddresses, list[int]]:
    asked = AskedAddresses()
    for tensor in tensors:
        asked.note(tensor, tensor.data_ptr())
    return asked, [tensor.data_ptr() for tensor in tensors]


def test_an_address_whose_memory_is_gone_is_told_with_both_lines() -> None:
    kept, gone = torch.ones(700), torch.ones(700)
    asked, addresses = asked_of(kept, gone)
    assert asked.first_stale(table(*addresses)) is None
    del gone
    gc.collect()
    found = asked.first_stale(table(*addresses))
    assert found is not None
    index, stale = found
    assert (index, stale.address, stale.num_bytes) == ((1, 0), addresses[1], 2800)
    assert "test_asked_addresses.py:" in stale.asked_at
    assert "test_asked_addresses.py:" in stale.freed_at
    assert asked.first_stale(table(addresses[0], 5)) is None
    assert asked.first_stale(table(*addresses, dtype="F64")) is None


def test_a_view_keeps_the_memory() -> None:
    whole = torch.ones(700)
    asked, addresses = asked_of(whole)
    part = whole[3:]
    del whole
    gc.collect()
    assert asked.first_stale(table(*addresses)) is None
    assert part.sum().item() == 697


def test_memory_of_others_may_live_on_without_its_tensor() -> None:
    held = np.ones(700, np.float32)
    tensor = torch.from_numpy(held)
    asked, addresses = asked_of(tensor)
    del tensor
    gc.collect()
    assert asked.first_stale(table(*addresses)) is None


def test_memory_that_was_given_out_again_and_asked_for_is_there() -> None:
    gone = torch.ones(700)
    asked, [address] = asked_of(gone)
    del gone
    gc.collect()
    now = torch.ones(700)
    asked.note(now, address)  # as if it lay there
    assert asked.first_stale(table(address)) is None


class Storage:
    """Memory from `start` on, as torch tells of it."""

    def __init__(self, start: int, num_bytes: int) -> None:
        self.data_ptr, self.nbytes = lambda: start, lambda: num_bytes
        self.resizable = lambda: True


def test_other_memory_that_holds_the_address_now_is_there() -> None:
    gone, whole = Storage(4096, 64), Storage(2048, 4096)
    asked = AskedAddresses()
    asked.note(SimpleNamespace(untyped_storage=lambda kept=gone: kept), 4096)
    tensor = SimpleNamespace(untyped_storage=lambda: whole)
    del gone
    asked._asked[4096].storage = lambda: None
    assert asked.first_stale(table(4096)) is not None
    asked.note(tensor, 2048)
    assert asked.first_stale(table(4096)) is None


@pytest.mark.parametrize("where", ["before", "in a launch", "in a capture"])
def test_what_a_tensor_answers_is_noted_where_it_may_be(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tensor(torch.Tensor):  # type: ignore[misc]
        pass

    mine = AskedAddresses()
    monkeypatch.setattr(asked_hooks, "ASKED", mine)
    recorder: Any = SimpleNamespace(reads=SimpleNamespace(is_in_launch=where == "in a launch"))
    opened = None if where == "before" else recorder
    graphs: Any = SimpleNamespace(captured_into=7 if where == "in a capture" else None)
    watch_asked(
        SimpleNamespace(Tensor=Tensor), lambda: opened, graphs, lambda do, *given: do(*given)
    )
    tensor = torch.ones(700).as_subclass(Tensor)
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    assert (mine.first_stale(table(address)) is not None) == (where == "before")
