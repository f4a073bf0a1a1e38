"""What a kernel of torch.compile's was made of, in the program's own words: operations and lines.

`foreign/compiled/` writes these, and the doctor alone judges.
"""

from __future__ import annotations

import msgspec

from hypocenter.record.engine_events import Event


class GraphOp(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of a compiled graph: `node` is its name there, `op` torch's.

    `operands` are the nodes that it reads, in order. `sites` are the lines (file:line) of the
    program that asked for it, and `text` is the line where there is one.
    """

    node: str
    op: str
    operands: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    text: str = ""


class FusedKernel(Event, frozen=True, kw_only=True, tag=True):
    """A kernel that torch.compile made: `source` is the number of its text, as launches have it.

    `parameters` gives the node or the buffer that its launch passes for each, `names` what the
    program calls a node that is an input of its graph: `ids`, `self.table.weight`. `original` is
    the line (file:line) of the `def` in the program, where the kernel is one of the program's own.
    """

    kernel: str
    source: str
    ops: tuple[GraphOp, ...] = ()
    parameters: dict[str, str]
    names: dict[str, str]
    original: str = ""


class IndexMadeAgain(Event, frozen=True, kw_only=True, tag=True):
    """A compiled graph of the CPU failed at an index, and was run again, operation by operation.

    `op` is the first that failed, `said` its error. Element `element` of `index`, which is
    `index_shape` and of the program's name `index_name` where it is an input, holds `value`;
    dimension `dimension` of `target` has `bound` entries. `is_clean_inside`: the same operation
    with each such element put inside has no error. `kernel` is the compiled one that failed.
    """

    kernel: str
    op: GraphOp
    said: str
    index_name: str
    element: tuple[int, ...]
    value: int
    target_name: str
    dimension: int
    bound: int
    num_outside: int
    is_clean_inside: bool
