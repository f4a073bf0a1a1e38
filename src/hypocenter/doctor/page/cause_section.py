"""The part of a page about one proven cause: what to change, where it shows, the proof, the launch.

The rest of the page is told by others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES, Array
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case, array_of
from hypocenter.doctor.diagnosis import GpuSight, RootCause
from hypocenter.doctor.fact_text import dims_text
from hypocenter.doctor.page.address_life import first_values
from hypocenter.doctor.page.example_access import ExampleAccess, launch_of_root
from hypocenter.doctor.page.markup import Html, bytes_text, join_html, place_of_file, prose, tag
from hypocenter.doctor.page.source_view import SourceMark, number_text, source_html, source_views
from hypocenter.doctor.report_parts import Origin, fix_rows, proof_rows, spots_of, when_of
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import ArgumentRecord, TensorRecord, Values

_MAX_ARGUMENTS = 40


def what_to_do(case: Case, root: RootCause, origin: Origin) -> Html:
    """The fix, the line that is to be changed, and the command that shows it again."""
    rows = [tag("p", prose(root.fix), class_="fix")]
    rows += [tag("p", f"{label}: ", prose(text)) for label, text in fix_rows(root)]
    for spot in spots_of(root):
        text = tag("code", spot.text) if spot.is_code else spot.text
        rows.append(tag("p", f"{spot.label} ", tag("code", spot.place), ": " * bool(text), text))
    if (when := when_of(root, origin)) is not None:
        again = (" See it again: ", tag("code", when.command)) if when.command else ()
        rows.append(tag("p", f"In {when.launch}.", *again))
        use = launch_of_root(case, root) if when.command else None
        if use is not None and use.launch.device != "cpu" and use.launch.source in case.sources:
            alone = tag("code", f"{when.command} --export repro.py")
            rows.append(tag("p", "As a program without hypocenter: ", alone, class_="note"))
    return tag("div", *rows, class_="do")


def where_it_shows(case: Case, root: RootCause, example: ExampleAccess) -> Html:
    """The kernel's source with the lines marked, and under each the values of one lane."""
    use = launch_of_root(case, root)
    launch = use.launch if use else None
    marks: list[SourceMark] = []
    if root.file and root.line:
        marks.append(SourceMark(root.file, root.line, root.expression or ""))
    for finding in (example.shown, example.outside):
        if finding is not None and finding.file and finding.line:
            marks = [mark for mark in marks if mark.place != (finding.file, finding.line)]
            marks.append(
                SourceMark(finding.file, finding.line, finding.sites[0].expression, finding)
            )
    marks.sort(key=lambda mark: mark.place != (root.file, root.line))
    parts = [source_html(view) for view in source_views(case, launch, marks)]
    if not parts and marks:
        place = place_of_file(f"{root.file}:{root.line}")
        parts = [tag("p", place, ": the source was not recorded", class_="note")]
    return join_html(parts and [tag("h2", "Where it shows"), *parts])


def proof_html(root: RootCause) -> Html:
    """The test that fails, the one change, and the test that passes."""
    rows = (
        tag("li", tag("b", label), " ", prose(text), class_=label)
        for label, text in proof_rows(root)
    )
    return join_html((tag("h2", "The proof"), tag("ol", *rows, class_="proof")))


def sights_html(case: Case, sights: tuple[GpuSight, ...]) -> Iterator[Html]:
    """The lines at which GPUs stood, where their source was recorded."""
    for sight in sights:
        marks = [SourceMark(sight.file, sight.line, sight.text)]
        yield from (source_html(view) for view in source_views(case, None, marks))


def launch_html(case: Case, root: RootCause) -> Html:
    """The arguments of the launch as they were recorded, the blamed one marked."""
    use = launch_of_root(case, root)
    if use is None:
        return Html()
    launch = use.launch
    sizes = [f"grid {dims_text(launch.grid)}"]
    sizes += [f"{launch.num_warps} warps"] if launch.num_warps else []
    sizes += [f"{name} = {number_text(value)}" for name, value in launch.constants.items()]
    given = [(argument, _is_blamed(case, use, root, argument)) for argument in launch.arguments]
    numbers = [
        argument for argument, is_blamed in given if argument.tensor is None and not is_blamed
    ]
    rows = [
        _argument(case, use, argument, is_blamed)
        for argument, is_blamed in given[:_MAX_ARGUMENTS]
        if argument not in numbers
    ]
    if numbers:
        told = ", ".join(f"{a.name} = {_scalar_text(a)}" for a in numbers[:_MAX_ARGUMENTS])
        rows.append(tag("li", tag("code", told)))
    at = [" by ", place_of_file(launch.site)] if launch.site else []
    return join_html(
        (
            tag("h2", f"What {launch.kernel} was given"),
            tag("p", "Launched", *at, ": ", tag("code", ", ".join(sizes)), class_="note"),
            tag("ul", *rows, class_="facts"),
        )
    )


def _is_blamed(case: Case, use: LaunchMade, root: RootCause, argument: ArgumentRecord) -> bool:
    return root.argument in (argument.name, case.fact_of(use.launch, argument.name))


def _scalar_text(argument: ArgumentRecord) -> str:
    return "null" if argument.value is None else number_text(argument.value)


def _argument(case: Case, use: LaunchMade, argument: ArgumentRecord, is_blamed: bool) -> Html:
    attributes = {"class_": "blamed"} if is_blamed else {}
    tensor = case.tensors.get(argument.tensor) if argument.tensor is not None else None
    name = tag("b", argument.name)
    if tensor is None:
        return tag("li", name, f" = {_scalar_text(argument)}", **attributes)
    small = [tag("small", _tensor_text(tensor))]
    values = case.index.values(use.place).get(tensor.id) if use.place is not None else None
    if values is not None and values.data:
        is_foreign_float = case.is_foreign and array_of(values).dtype.kind not in "iu"
        text = _unwritten_text(values) if is_foreign_float else _values_text(values)
        small.append(tag("small", f"held {text}"))
        small += [tag("small", text) for text in _as_read(case, use, argument, values)]
    given = f" = {tensor.name}" if tensor.name != argument.name else ""
    return tag("li", name, given, *small, **attributes)


def _tensor_text(tensor: TensorRecord) -> str:
    part = f", {tensor.part}" if tensor.part else ""
    return (
        f"{tensor.dtype.lower()} {dims_text(tensor.shape)}, strides {dims_text(tensor.strides)}"
        f"{part}, {bytes_text(tensor.extent_bytes)} at {tensor.address:#x}, of {tensor.owner}"
    )


def _unwritten_text(values: Values) -> str:
    """Of floats of a program only this is kept: which elements nobody had written."""
    size = max(math.prod(values.shape), 1)
    width = len(values.data) // size
    pattern = b"\xff" * width
    number = sum(values.data[at * width : (at + 1) * width] == pattern for at in range(size))
    many = count_text(size, "element")
    return (
        f"{number} of {many} that nobody had written" if number else f"{many}, all written before"
    )


def _values_text(values: Values) -> str:
    """The first numbers; of more, the least and the largest as well, and where they stand."""
    array = array_of(values)
    text = first_values(values)
    if array.dtype.kind not in "iu" or array.size <= 8:
        return text
    ends = []
    for name, number in (("least", int(array.argmin())), ("largest", int(array.argmax()))):
        at = dims_text(tuple(map(int, np.unravel_index(number, array.shape))))
        ends.append(f"{name} {int(array.reshape(-1)[number])} at {at}")
    return f"{text}; {', '.join(ends)}"


def _as_read(
    case: Case, use: LaunchMade, argument: ArgumentRecord, values: Values
) -> Iterator[str]:
    """What a kernel that reads elements of another width makes of the same bytes."""
    declaration = case.bundle.declaration(use.launch)
    fact = case.fact_of(use.launch, argument.name)
    declared = declaration.argument(fact) if declaration is not None else None
    reads = NUMPY_DTYPES.get(declared.dtypes[0].upper()) if declared and declared.dtypes else None
    given = NUMPY_DTYPES.get(values.dtype.upper())
    if reads is None or given is None or reads.itemsize == given.itemsize:
        return
    whole = len(values.data) // reads.itemsize * reads.itemsize
    read: Array = np.frombuffer(values.data[:whole], reads)
    shown = ", ".join(str(number) for number in read[:8].tolist())
    yield f"the kernel reads {reads.name}: [{shown}{', ...' if read.size > 8 else ''}]"
