"""A recorded launch as a Python file of its own, which needs Triton and torch and nothing else.

Writes text, and runs nothing: the kernel's source is parsed and never executed here.
"""

from __future__ import annotations

import ast
import base64
import keyword
import math
import re
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from hypocenter.base.errors import NotReplayed, UsageError
from hypocenter.base.package import version
from hypocenter.device.triton_lang import tl
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import Place, SourceRecord, TensorRecord
from hypocenter.replay.admission import RecordedTensor, item_bytes_of
from hypocenter.replay.findings import Finding, FindingKind
from hypocenter.replay.rebuild import Rebuilt
from hypocenter.replay.source import aliases_of
from hypocenter.replay.text import finding_text

#: Values that are written as numbers, and what is written of all others when it is packed.
_MAX_NUMBERS, _MAX_PACKED_BYTES = 4096, 8 << 20
#: Options of a launch that Triton takes beside its arguments.
_OPTIONS = ("num_ctas", "num_stages", "maxnreg", "matrix_instr_nonkdim", "waves_per_eu", "kpack")
_UNDEFINED = (FindingKind.NEVER_WRITTEN,)
_GONE = {
    FindingKind.FREED_MEMORY: "freed memory",
    FindingKind.NULL_POINTER: "null pointer",
    FindingKind.HOST_POINTER: "host pointer",
}
_FUTURE = "from __future__ import annotations\n\n"


def repro_text(
    index: BundleIndex, place: Place, expected: Sequence[str], finding: Finding | None = None
) -> str:
    """The file. `expected` are lines that say what goes wrong; `finding` says it as facts.

    Raises UsageError for a launch that no file can repeat, NotReplayed for records that do not fit
    together or a source that does not define its kernel.
    """
    launch = index.launch(place)
    harness = _harness_text()
    body = _body(index, place, harness, "reproduce", finding)
    return "\n".join([*_header(launch.kernel, expected), harness, *body])


def runs_text(index: BundleIndex, place: Place) -> str:
    """A file for `device_child.py`, which runs the launch as its first argument says.

    Raises as `repro_text` does.
    """
    first = (
        "import sys\n\nfrom hypocenter.replay.device_child import make_runs\n"
        "from hypocenter.replay.reproduction import Recording"
    )
    return "\n".join([first, *_body(index, place, first, "make_runs", None)])


def _body(
    index: BundleIndex, place: Place, harness: str, entry: str, finding: Finding | None
) -> Iterator[str]:
    """The kernel, and a call of `entry` of the harness with it and with all that it is given."""
    launch = index.launch(place)
    if launch.device.split(":")[0] == "cpu":
        raise UsageError(f"{launch.kernel} runs on the CPU; only GPU kernels are exported")
    record = index.sources.get(launch.source)
    if record is None or not record.text:
        raise NotReplayed(launch.kernel, "has no source in the bundle")
    try:
        rebuilt = Rebuilt(index, place, launch, {})
        data = list(_data(rebuilt, finding))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
        raise NotReplayed(launch.kernel, f"has a record that makes no sense ({told})") from error
    functions = _functions(index, record)
    _refuse_names_of_ours(functions, harness)
    yield from _imports(functions)
    yield from functions.values()
    yield _call(entry, record.function, data)


def expected_lines(finding: Finding) -> list[str]:
    """What a finding says, as lines of text."""
    return finding_text(finding).splitlines()


# -- parts of the file ----------------------------------------------------------------------------


def _header(kernel: str, expected: Sequence[str]) -> Iterator[str]:
    """Comments, of which no text of a bundle can break out; the first two lines are ours."""
    yield f"# A recorded launch, written by hypocenter {version()}."
    yield "# It needs Triton and torch, and nothing of hypocenter."
    yield "#"
    yield _comment(f"EXPECTED in the launch of {kernel}:")
    yield from (_comment(f"    {line}") for line in expected)
    yield "#"
    yield "#     TRITON_INTERPRET=1 python FILE     without a GPU"
    yield "#     python FILE                        on a GPU"
    yield "#     compute-sanitizer python FILE      there, for an access near its tensor"
    yield "#"
    yield "# What nobody wrote, and reads of it, show in `hypo check` of the program, and not here."
    yield "#"
    yield "# The kernel's text comes from the bundle: read it before you run it. Tensors hold what"
    yield "# was recorded, else zeros. The exit status is 3 where the launch broke."


def _comment(text: str) -> str:
    return "# " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _harness_text() -> str:
    """What runs the launch: a module of this package, as it stands."""
    text = (resources.files("hypocenter") / "replay" / "reproduction.py").read_text()
    # Triton would read annotations of kernels as text with it.
    return text.replace(_FUTURE, "", 1)


def _imports(functions: dict[str, str]) -> Iterator[str]:
    yield "\nimport math\n\nimport triton\nimport triton.language as tl"
    if any(re.search(r"\blibdevice\b", text) for text in functions.values()):
        yield "from triton.language.extra import libdevice"


def _functions(index: BundleIndex, record: SourceRecord) -> dict[str, str]:
    """The kernel's text and that of all that it calls, by name, callees first."""
    found: dict[str, str] = {}
    constants: dict[str, str] = {}
    for source in _in_order(index, record, {}):
        text = _function_text(
            source, [index.sources[k].function for k in source.callees if k in index.sources]
        )
        for name, value in source.constants.items():
            if not name.isidentifier() or keyword.iskeyword(name):
                raise NotReplayed(record.function, f"names a constant {name!r}")
            if constants.setdefault(name, _literal(value)) != _literal(value):
                raise NotReplayed(record.function, f"calls functions with another {name} each")
        if found.setdefault(source.function, text) != text:
            raise NotReplayed(record.function, f"calls two functions {source.function}")
    lines = "".join(f"{name} = tl.constexpr({value})\n" for name, value in constants.items())
    return {"": lines, **found} if lines else found


def _in_order(
    index: BundleIndex, record: SourceRecord, seen: dict[str, None]
) -> Iterator[SourceRecord]:
    seen[record.id] = None
    for key in record.callees:
        if key in index.sources and key not in seen:
            yield from _in_order(index, index.sources[key], seen)
    yield record


def _function_text(source: SourceRecord, callees: Sequence[str]) -> str:
    """The function alone, without its decorators, which may be anybody's, and with jit's."""
    text = textwrap.dedent(source.text)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise NotReplayed(source.function, "has a source that is not Python") from error
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == source.function]
    if len(found) != 1:
        raise NotReplayed(source.function, "is not defined by its source in the bundle")
    [function] = found
    # As Python counts lines: `splitlines` also parts at characters that end none.
    lines = re.split(r"\r\n|\r|\n", text)[function.lineno - 1 : function.end_lineno]
    known = {*callees, *source.constants, "tl", "triton", "math", "libdevice", function.name}
    aliases = "".join(
        f"{name} = tl\n" if value is tl else f"{name} = tl.{name}\n"
        for name, value in aliases_of(function, known).items()
    )
    return f"{aliases}\n\n@triton.jit\n" + "\n".join(lines)


def _call(entry: str, function: str, data: Sequence[str]) -> str:
    inner = "".join(f"            {line}\n" for line in data)
    return (
        '\n\nif __name__ == "__main__":\n    recording = Recording(\n'
        f"            {function},\n{inner}    )\n    sys.exit({entry}(recording))\n"
    )


def _refuse_names_of_ours(functions: dict[str, str], harness: str) -> None:
    """A kernel that is named as a part of the file would take its place."""
    taken = {*_bound_names(harness), "triton", "tl", "math"}
    for name in _bound_names("\n".join(functions.values())):
        if name in taken:
            raise NotReplayed(name, "has a name that the exported file needs for itself")


def _bound_names(text: str) -> Iterator[str]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (name.id for name in node.targets if isinstance(name, ast.Name))


# -- data -----------------------------------------------------------------------------------------


def _data(rebuilt: Rebuilt, finding: Finding | None) -> Iterator[str]:
    launch = rebuilt.launch
    tensors = {n: v for n, v in rebuilt.arguments.items() if isinstance(v, RecordedTensor)}
    numbers = {n: v for n, v in rebuilt.arguments.items() if n not in tensors}
    groups = _groups(rebuilt, tensors)
    yield f"grid={_literal(rebuilt.grid)},"
    yield "# Bytes, and what they held: (at byte, width, numbers or packed bytes)."
    yield "memories={"
    for number, group in enumerate(groups, 1):
        yield f"    {number}: {_memory(rebuilt, tensors, group, finding)},"
    yield "},"
    yield "tensors={"
    for number, group in enumerate(groups, 1):
        low = min(rebuilt.tensors[name].address for name in group)
        for name in group:
            fields = _tensor(tensors[name], rebuilt.tensors[name], number, low)
            yield f"    {_literal(name)}: {fields},"
    yield "},"
    yield f"numbers={_literal(numbers)},"
    options: dict[str, Any] = {"num_warps": launch.num_warps} if launch.num_warps else {}
    options |= {n: v for n, v in launch.options.items() if n in _OPTIONS and v is not None}
    if finding is not None and finding.kind is FindingKind.RACE:
        options["is_race"] = True
    yield f"options={_literal(options)},"


def _groups(rebuilt: Rebuilt, tensors: dict[str, RecordedTensor]) -> list[list[str]]:
    """Names of tensors that overlap in memory, which have to lie in one here too."""
    ordered = sorted(tensors, key=lambda n: (_allocation(rebuilt, n), rebuilt.tensors[n].address))
    groups: list[list[str]] = []
    end, last = -1, -1
    for name in ordered:
        record, room = rebuilt.tensors[name], tensors[name].num_bytes
        if groups and record.allocation == last and room and record.address < end:
            groups[-1].append(name)
            end = max(end, record.address + room)
        else:
            groups.append([name])
            end, last = record.address + room, record.allocation
    return groups


def _allocation(rebuilt: Rebuilt, name: str) -> int:
    return rebuilt.tensors[name].allocation


def _memory(
    rebuilt: Rebuilt, tensors: dict[str, RecordedTensor], group: list[str], finding: Finding | None
) -> str:
    records = [rebuilt.tensors[name] for name in group]
    low = min(record.address for record in records)
    rooms = [r.address - low + tensors[n].num_bytes for n, r in zip(group, records, strict=True)]
    fields: dict[str, Any] = {"num_bytes": max(rooms), "alignment": low % 256}
    if not fields["num_bytes"] and any(record.extent_bytes for record in records):
        kind = finding.kind if finding is not None and finding.argument in group else None
        is_null = all(not record.address for record in records)
        gone = _GONE.get(kind) if kind is not None else None
        fields["num_bytes"] = max(record.extent_bytes for record in records)
        fields["gone"] = gone or ("null pointer" if is_null else "freed memory")
        return _literal(fields)
    is_aimed = finding is not None and finding.argument in group
    if is_aimed and finding is not None and finding.number is not None and finding.number < 0:
        fields["at_start"] = True
    if is_aimed and finding is not None and finding.kind in _UNDEFINED:
        fields["undefined"] = True
    values = [
        packed
        for name, record in zip(group, records, strict=True)
        if (packed := _values(tensors[name], record.address - low)) is not None
    ]
    return _literal(fields | ({"values": values} if values else {}))


def _values(tensor: RecordedTensor, start: int) -> tuple[int, int, list[int] | str] | None:
    """What the bytes of a tensor held, unless it is all zeros."""
    if tensor.data is None:
        return None
    own = tensor.data[tensor.start : tensor.start + tensor.num_bytes]
    if not own.any():
        return None
    width = tensor.item_bytes
    is_whole = re.match(r"u?int|bool", tensor.dtype) and own.size % width == 0
    if is_whole and own.size // width <= _MAX_NUMBERS and width in (1, 2, 4, 8):
        data = own.tobytes()
        signed = tensor.dtype.startswith("int")
        numbers = [
            int.from_bytes(data[at : at + width], "little", signed=signed)
            for at in range(0, len(data), width)
        ]
        return start, width, numbers
    packed = zlib.compress(own.tobytes(), 9)
    if len(packed) > _MAX_PACKED_BYTES:
        return None
    return start, 0, base64.b64encode(packed).decode()


def _tensor(tensor: RecordedTensor, record: TensorRecord, memory: int, low: int) -> str:
    fields = {
        "memory": memory,
        "start": record.address - low,
        "dtype": tensor.dtype,
        "width": item_bytes_of(tensor.dtype),
        "shape": tensor.shape,
        "strides": tensor.strides,
    }
    return _literal(fields)


def _literal(value: Any) -> str:
    """A value as Python text in ASCII, out of which nothing breaks."""
    if isinstance(value, bool | int) or value is None:
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if isinstance(value, str):
        return ascii(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        inner = ", ".join(map(_literal, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    raise TypeError(f"{type(value).__name__} has no literal")
