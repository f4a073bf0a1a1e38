"""A proven cause of a kernel that torch.compile made, told in the words of the program.

Inductor notes which operations a kernel is made of, and Dynamo the line of each. The operation
that a cause is about is the one whose index is made of the parameter at fault; where several are,
none is told as the one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Edit, RootCause
from hypocenter.doctor.kernel_text import function_of, line_text
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.compiled_graph import FusedKernel, GraphOp
from hypocenter.record.events import LaunchRecord, SourceRecord

#: Operations whose operands from the second to the last are indices, and those whose last of all is
#: what is written.
_EACH = frozenset({"index", "_unsafe_index"})
_BUT_LAST = frozenset({"index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"})
_OF_INDICES = frozenset({Cause.INDEX_RANGE, Cause.SENTINEL_CONSUMED, Cause.WILD_POINTER})
#: Operations whose second operand is one.
_SECOND = frozenset(
    {"embedding", "gather", "index_select", "scatter", "scatter_", "scatter_add", "scatter_add_"}
    | {"scatter_reduce", "scatter_reduce_", "index_add", "index_copy", "index_fill"}
    | {"embedding_dense_backward"}
)


def user_name_of(case: Case, launch: LaunchRecord, parameter: str) -> str:
    """What the program calls a parameter of a compiled kernel; the parameter where it has none."""
    names = {
        record.names.get(record.parameters.get(parameter, ""), "")
        for record in _records(case, launch)
    }
    name = names.pop() if len(names) == 1 else ""
    return name or parameter


def operation_of(case: Case, launch: LaunchRecord, parameter: str) -> GraphOp | None:
    """The one operation that takes an index of what a parameter holds; None unless one is sure."""
    return _the_one(_operations(case, launch, parameter))


def in_users_words(case: Case, root: RootCause) -> RootCause:
    """The same cause: at the program's line and of its tensor, where they are known."""
    use = next((use for use in case.launches if use.place == root.place), None)
    if root.place is None or use is None or not _records(case, use.launch):
        return root
    own = _of_own_kernel(case, use, root)
    if own is not None:
        return own
    entries = (*root.entries, *((root.entry,) if root.entry is not None else ()))
    parameter = entries[0].argument if entries else root.argument
    if parameter is None:
        return root
    # Of an access the argument is what was accessed, and of an assertion what holds the index.
    holds_index = bool(entries) or (root.cause in _OF_INDICES and root.finding is None)
    op = operation_of(case, use.launch, parameter) if holds_index else None
    if root.cause in _OF_INDICES and op is None:
        op = _the_one(_all_indexing(case, use.launch))
    name = user_name_of(case, use.launch, parameter)
    told = root if name == parameter else msgspec.structs.replace(root, tensor=name)
    if op is None or len(op.sites) != 1 or not op.text:
        return told
    file, _, line = op.sites[0].rpartition(":")
    beside = f"torch.compile made {root.kernel} of it and of what stands around it"
    if root.file:
        beside += f"; there it is {root.file}:{root.line} `{root.expression or ''}`"
    return msgspec.structs.replace(
        told,
        sentence=f"{told.sentence}; it is asked for by `{op.text}`",
        file=file,
        line=int(line),
        expression=op.text,
        beside=(*told.beside, beside),
    )


def _records(case: Case, launch: LaunchRecord) -> list[FusedKernel]:
    return [
        event
        for event in case.index.events_of(FusedKernel)
        if event.source == launch.source and event.kernel == launch.kernel
    ]


# -- operations -----------------------------------------------------------------------------------


def _the_one(ops: Iterable[GraphOp]) -> GraphOp | None:
    """An operation, if all are the same one in the same line."""
    found = {(op.sites, op.op): op for op in ops}
    return next(iter(found.values())) if len(found) == 1 else None


def _all_indexing(case: Case, launch: LaunchRecord) -> Iterator[GraphOp]:
    return (op for record in _records(case, launch) for op in record.ops if indices_of(op))


def _operations(case: Case, launch: LaunchRecord, parameter: str) -> Iterator[GraphOp]:
    """Those of which an index is made of what a parameter holds."""
    for record in _records(case, launch):
        by_node = {op.node: op for op in record.ops}
        node, passed = record.parameters.get(parameter, ""), set(record.parameters.values())
        leaves = {operand for op in record.ops for operand in op.operands} - set(by_node)
        # A buffer that another kernel fills has a name of its own, and its node has another.
        unknown = leaves - passed
        if node not in leaves and len(unknown) == 1:
            [node] = unknown
        for op in record.ops:
            if any(node in _leaves(index, by_node) for index in indices_of(op)):
                yield op


def indices_of(op: GraphOp) -> tuple[str, ...]:
    """The operands of an operation that are indices."""
    name = op.op.removeprefix("aten.").partition(".")[0]
    if name in _EACH:
        return op.operands[1:]
    if name in _BUT_LAST:
        return op.operands[1:-1]
    return op.operands[1:2] if name in _SECOND else ()


def _leaves(node: str, by_node: dict[str, GraphOp]) -> set[str]:
    """The nodes outside of the kernel whose values one in it has; itself, if it is outside."""
    found, left, seen = set(), [node], set()
    while left:
        one = left.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in by_node:  # what is taken by an index has the values of what it is taken from
            op = by_node[one]
            left += [operand for operand in op.operands if operand not in indices_of(op)]
        else:
            found.add(one)
    return found


# -- kernels of the program's own -----------------------------------------------------------------


def _of_own_kernel(case: Case, use: LaunchMade, root: RootCause) -> RootCause | None:
    """At the line of the program's own file, of a kernel that it wrote and torch.compile launches.

    None for a kernel of Inductor's own, and where the lines are not the same.
    """
    originals = {record.original for record in _records(case, use.launch)}
    source = case.sources.get(use.launch.source)
    original = originals.pop() if len(originals) == 1 else ""
    if not original or source is None or not root.line:
        return None
    place = _original_line(source, original, root.line)
    if place is None or root.file != source.file:
        return None
    file, line = place
    edits = [
        msgspec.structs.replace(edit, file=moved[0], line=moved[1])
        for edit in root.edits
        if (moved := _place_of_edit(source, original, edit)) is not None
    ]
    whole = len(edits) == len(root.edits)
    name = user_name_of(case, use.launch, root.argument or "")
    return msgspec.structs.replace(
        root,
        tensor=root.tensor if name == (root.argument or "") else name,
        file=file,
        line=line,
        edits=tuple(edits) if whole else root.edits,
    )


def _place_of_edit(source: SourceRecord, original: str, edit: Edit) -> tuple[str, int] | None:
    is_in_kernel = not edit.name and edit.file == source.file
    return _original_line(source, original, edit.line) if is_in_kernel else (edit.file, edit.line)


def _original_line(source: SourceRecord, original: str, line: int) -> tuple[str, int] | None:
    function = function_of(source.text)
    if function is None or not line_text(source, line):
        return None
    file, _, first = original.rpartition(":")
    return file, int(first) + line - (source.first_line + function.lineno - 1)
