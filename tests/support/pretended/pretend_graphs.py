"""Graphs of torch's without a GPU: captures take launches, and replays run nothing.

`install` gives torch's own CUDAGraph and `torch.cuda.graph` what they call of CUDA. Launches are
those of `pretend_driver.py`, and tensors of the CPU say that they are on a GPU.
`in_private_pool` says of a tensor that its memory is a graph's own.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import contextlib

import torch

from hypocenter.check.pretend_gpu import OnCpu
from pretended.pretend_driver import install as install_driver

#: What torch's allocator has: everything.
_segments = [
    {"address": 0, "total_size": 1 << 63, "segment_pool_id": (0, 0), "device": 0, "blocks": []}
]


class _State:
    is_capturing = False
    num_replays = 0
    #: Of launches that were made, and of those that only a graph took.
    num_launched = num_captured = 0


def _begin(graph, pool=None, capture_error_mode="global"):
    _State.is_capturing = True


def _end(graph):
    _State.is_capturing = False


def _replay(graph):
    _State.num_replays += 1


def in_private_pool(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    _segments.append(
        {
            "address": storage.data_ptr(),
            "total_size": storage.nbytes(),
            "segment_pool_id": (0, 1),
            "device": 0,
            "blocks": [],
        }
    )
    return tensor


def install() -> type[_State]:
    """From now on graphs can be captured in this process; returns what was done with them."""

    def launch(name, args):
        _State.num_captured += _State.is_capturing
        _State.num_launched += not _State.is_capturing

    install_driver(launch)
    return install_graphs()


def install_graphs() -> type[_State]:
    """The same, for launches that go through another driver."""
    base = torch.cuda.CUDAGraph.__mro__[1]
    base.__new__ = lambda kind, *args: object.__new__(kind)
    base.__init__ = lambda graph, *args: None
    base.capture_begin, base.capture_end, base.replay = _begin, _end, _replay
    base.pool = lambda graph: (0, 1)
    torch.cuda.is_current_stream_capturing = lambda: _State.is_capturing
    torch.cuda.memory_snapshot = lambda: list(_segments)
    torch.cuda.synchronize = torch.cuda.empty_cache = torch._C._host_emptyCache = lambda: None
    torch.cuda.Stream = object
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    OnCpu(lambda source, copy: None).__enter__()
    return _State
