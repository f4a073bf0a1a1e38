"""What a runner holds in memory, counted from its tensors themselves; no verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from hypocenter.base.tensor import Tensor
from hypocenter.engine.runner import Runner


def tensors_of(held: object) -> Iterator[Tensor]:
    """The tensors in a tensor, a tuple or a dataclass of such."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, tuple):
        for part in held:
            yield from tensors_of(part)
    elif isinstance(held, dict):
        yield from tensors_of(tuple(held.values()))
    elif is_dataclass(held):
        for field in fields(held):
            yield from tensors_of(getattr(held, field.name))


def resident_bytes(runner: Runner) -> int:
    """What a runner's tensors hold, counted from the tensors themselves."""
    decoder = runner._decoder
    held = (
        runner.weights, decoder.pages, decoder._buffers, decoder._logits_buffers._buffers,
        tuple(decoder._attending._cpu_tiles.values()), decoder._operands.operands,
        decoder._gated.operands, decoder._mixture,
        decoder._latent and (decoder._latent.heads, decoder._latent.queries),
        decoder._state_net and (decoder._state_net.buffers, decoder._state_net.states),
    )  # fmt: skip
    allocations = {id(one.allocation): one.allocation.num_bytes for one in tensors_of(held)}
    return sum(allocations.values())
