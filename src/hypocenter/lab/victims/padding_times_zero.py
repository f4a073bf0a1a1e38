"""Weights of 0 times values that nobody has written: NaN."""

from __future__ import annotations

from typing import Any

from hypocenter.device import memory
from hypocenter.diagnosis import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.model import decoder
from hypocenter.model.decoder import KVPages

OLD = "v = tl.load(v_cache_ptr + v_at, mask=(key <= last)[:, None] & column[None, :], other=0.0)"
NEW = OLD.replace("key <=", "key // 16 * 16 <=")


def undefined_cache(lab: Lab) -> None:
    """Pages begin undefined, as torch.empty gives them."""

    def allocate(make: Any, cls: Any, *given: Any, device: str) -> Any:
        cleared = lab.patch(decoder, "allocate", memory.allocate_undefined)
        try:
            return make(cls, *given, device=device)
        finally:
            lab.patch(decoder, "allocate", cleared)

    lab.wrap(KVPages, "allocate", allocate)


def plant(lab: Lab) -> None:
    undefined_cache(lab)
    lab.edit("attention_tile_gpu", (OLD, NEW))


def twin(lab: Lab) -> None:
    undefined_cache(lab)


VICTIM = Victim(
    name="padding_times_zero",
    title="attention weighs unwritten values with 0",
    cause=Cause.NONFINITE_PADDING,
    symptom="nonfinite",
    kernel="attention",
    argument="v_cache",
    line=NEW,
    source="vllm#641",
    plant=plant,
    twin=twin,
)
