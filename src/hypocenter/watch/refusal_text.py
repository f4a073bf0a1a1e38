"""What runtimes, compilers and kernels refuse in words of their own, as facts.

Formats: Triton's OutOfResources, AutotunerError and CompilationError (triton/runtime/errors.py and
triton/compiler/errors.py of 3.6 to 3.9), HIP's line of a file without code for a GPU
(hip_fatbin.cpp of CLR), torch's warning of a GPU that it has no code for (torch/cuda/__init__.py),
assertions as the runtimes of CUDA and HIP print them. `fault_text.py` calls this for what a program
wrote to stderr.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from hypocenter.base.errors import ErrorKind
from hypocenter.base.package import is_own_file
from hypocenter.base.refusals import (
    AnyRefusal,
    CaptureError,
    CompileError,
    DeviceAssert,
    NoCode,
    NoConfiguration,
    OldInterpreter,
    ResourceExceeded,
)
from hypocenter.record.runtime_text import code_in, is_of_capture, kind_of_text

MAX_CHARS = 1000
_MAX_ASSERTIONS = 100_000

_RESOURCE = re.compile(
    r"^[\w.]{0,80}OutOfResources: out of resource: ([a-z ]{1,40}), Required: (\d{1,18}), "
    r"Hardware limit: (\d{1,18})\.",
    re.M,
)
_AUTOTUNER = re.compile(r"^[\w.]{0,80}AutotunerError: Autotuner error: ([^\n]{1,400})", re.M)
#: What NumPy 2.4 says to the interpreter of Triton 3.6 and older, and the line that it says it to.
_INTERPRETER = re.compile(
    r"^[\w.]{0,80}InterpreterError: TypeError\('(only 0-dimensional [^\n']{1,200})'\)", re.M
)
_COUNTS_LOOPS = "int(self.handle.data)"
_COMPILE = re.compile(
    r"^[\w.]{0,80}(?:CompilationError|UnsupportedLanguageConstruct): at (\d{1,9}):(\d{1,9}):\n"
    r"((?:[^\n]{0,500}\n){1,40}?) {0,500}\^\n([^\n]{1,1000})",
    re.M,
)
_RUNTIME = re.compile(
    r"^[^\n]{0,300}?\b(?:CUDA|HIP|ROCm|Triton) [Ee]rror(?: \[(?:CUDA|HIP)\])?:? ?([^\n]{1,400})",
    re.M,
)
_ASSERTION = re.compile(
    r"^([^\n:]{1,300}):(\d{1,9}): ([^\n]{1,500}?): "
    r"(?:block: \[(\d+),(\d+),(\d+)\], thread: \[(\d+),(\d+),(\d+)\] Assertion|"
    r"Device-side assertion) `([^\n]{1,300}?)[`'] failed",
    re.M,
)
#: torch 2.13 and newer; before, and from there on where nothing but the architecture differs.
_NO_CODE = (
    re.compile(
        r"Found GPU\d+ ([^\n]{1,100}) which is of compute capability \(CC\) (\d+)\.(\d+)\.\s+"
        r"The following list shows the CCs[^\n]*\n((?: *- \d+\.\d+ which[^\n]{0,100}\n)*)"
    ),
    re.compile(
        r"^ *([^\n]{1,100}) with CUDA capability sm_(\d+)(\d) is not compatible with the current "
        r"PyTorch installation\.\s+The current PyTorch install supports CUDA capabilities "
        r"([^\n]{1,300}?)\.?$",
        re.M,
    ),
)
_NO_OBJECTS = re.compile(r"^[^\n]{0,200}No compatible code objects found for: (gfx\w{1,12})", re.M)
#: Of ROCm before 6, and the list that its log has below: a target, and whether code was found.
_NO_BINARY = re.compile(
    r"^[^\n]{0,200}hipErrorNoBinaryForG[Pp][Uu]: Unable to find code object for all current", re.M
)
_DEVICE_WITHOUT = re.compile(r"amdgcn-amd-amdhsa--(gfx\w{1,12})[\w:+-]{0,40} - \[Not Found\]")
_FRAME = re.compile(
    r'^  File "([^"\n]{1,400})", line (\d{1,9}), in [^\n]*\n(?:    ([^\n]*)\n)?', re.M
)
_LAUNCHED = re.compile(r"(?:^|[=\s.(])([A-Za-z_]\w*)\[[^\n]*")
#: Parts of file names in which no program of anybody's own lies.
_INSTALLED = (
    *("site-packages", "dist-packages", "/lib/python3", "<frozen", "<string>"),
    "/triton/runtime/",  # wherever its checkout lies
)


class ToldRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """A refusal that a program told of, and the nearest line of the program's own behind it.

    `kernel` is its name where the refusal or that line says one; `site` is file:line.
    """

    refusal: AnyRefusal
    message: str
    error_kind: ErrorKind = ErrorKind.OTHER
    kernel: str = ""
    call: str = ""
    site: str = ""


def refused_in(stderr: str) -> ToldRefusal | None:
    """The first refusal of which a program tells; what follows the first is its echo."""
    found = [*_exceptions(stderr)]
    if not found:
        return None
    at, refusal, message, kind = min(found, key=lambda one: one[0])
    if isinstance(refusal, DeviceAssert):
        at = next((match.start() for match in _RUNTIME.finditer(stderr, at)), at)
    frames = _frames_before(stderr, at)
    own = [frame for frame in frames if not _is_installed(frame[1])]
    file, line, text = (own[-1][1:] if own else ("", "", "")) or ("", "", "")
    if isinstance(refusal, CaptureError):
        in_triton = any("/triton/" in frame[1] for frame in frames) or "Triton" in message
        refusal = msgspec.structs.replace(refusal, in_triton=in_triton)
    return ToldRefusal(
        refusal=refusal,
        message=message,
        error_kind=kind,
        kernel=_kernel(refusal, text),
        call=f"`{text.strip()[:200]}`" if text else "",
        site=f"{file}:{line}" if file else "",
    )


def _exceptions(stderr: str) -> Iterator[tuple[int, AnyRefusal, str, ErrorKind]]:
    """Where each kind of refusal begins, the refusal, its line, and what kind of error it is."""
    if match := _ASSERTION.search(stderr):
        yield match.start(), _assertion(stderr, match), match[0], ErrorKind.FOUND_LATER
    if match := _RESOURCE.search(stderr):
        exceeded = ResourceExceeded(
            resource=match[1], needed=int(match[2]), limit=int(match[3]), gpu="the GPU"
        )
        yield match.start(), exceeded, match[0], ErrorKind.OTHER
    if match := _AUTOTUNER.search(stderr):
        none_left = NoConfiguration(sentence=match[1].strip())
        yield match.start(), none_left, match[0], ErrorKind.OTHER
    if (match := _INTERPRETER.search(stderr)) and _COUNTS_LOOPS in stderr[: match.start()]:
        yield match.start(), OldInterpreter(sentence=match[1]), match[0], ErrorKind.OTHER
    if match := _COMPILE.search(stderr):
        text = match[3].rstrip("\n").split("\n")[-1].strip()
        refusal = CompileError(sentence=match[4][:MAX_CHARS], text=text)
        yield match.start(), refusal, f"CompilationError: {match[4]}"[:MAX_CHARS], ErrorKind.OTHER
    if match := _NO_OBJECTS.search(stderr):
        objects = NoCode(
            sentence="no compatible code objects were found", gpu="the GPU", wanted=match[1]
        )
        yield match.start(), objects, match[0].strip(), ErrorKind.NO_CODE
    if match := _NO_BINARY.search(stderr):
        without = _DEVICE_WITHOUT.search(stderr, match.end())
        binary = NoCode(
            sentence="no code object was found for all devices",
            gpu="the GPU" if without else "",
            wanted=without[1] if without else "",
        )
        yield match.start(), binary, match[0].strip(), ErrorKind.NO_CODE
    for match in _RUNTIME.finditer(stderr):
        sentence, code = match[1].strip(), code_in(match[0])
        if is_of_capture(code):
            assert code is not None
            capture = CaptureError(code=code, sentence=sentence)
            yield match.start(), capture, match[0], ErrorKind.OTHER
        elif kind_of_text(sentence) is ErrorKind.NO_CODE:
            yield match.start(), _no_code(stderr, sentence), match[0], ErrorKind.NO_CODE
        break  # the first error of a runtime is the one that counts


def _assertion(stderr: str, first: re.Match[str]) -> DeviceAssert:
    file, line, function, *numbers, condition = first.groups()
    every = 0
    for match in _ASSERTION.finditer(stderr):
        every += match[10] == condition and match[3] == function
        if every >= _MAX_ASSERTIONS:
            break
    at = tuple(int(number) for number in numbers if number is not None)
    return DeviceAssert(
        condition=condition,
        function=_bare(function),
        file=file.strip(),
        line=int(line),
        block=(at[0], at[1], at[2]) if at else None,
        thread=(at[3], at[4], at[5]) if at else None,
        num_threads=every,
    )


def _bare(function: str) -> str:
    """A function's name without its type, arguments and template."""
    return function.partition("(")[0].split("<")[0].split()[-1] if function.split() else function


def _no_code(stderr: str, sentence: str) -> NoCode:
    for pattern in _NO_CODE:
        if match := pattern.search(stderr):
            listed = re.findall(r"- (\d+)\.(\d+) which", match[4])
            archs = [f"sm_{major}{minor}" for major, minor in listed] or match[4].split()
            return NoCode(
                sentence=sentence,
                gpu=match[1].strip(),
                wanted=f"sm_{match[2]}{match[3]}",
                built_for=tuple(archs),
            )
    return NoCode(sentence=sentence)


def _frames_before(stderr: str, at: int) -> list[tuple[int, str, str, str]]:
    """The frames of the traceback that ends at a place: position, file, line and text of each."""
    start = stderr.rfind("Traceback (most recent call last)", 0, at)
    if start < 0:
        return []
    return [
        (match.start(), match[1], match[2], match[3] or "")
        for match in _FRAME.finditer(stderr, start, at)
    ]


def _is_installed(file: str) -> bool:
    return is_own_file(file) or any(part in file for part in _INSTALLED)


def _kernel(refusal: AnyRefusal, text: str) -> str:
    if isinstance(refusal, DeviceAssert):
        return refusal.function
    if isinstance(refusal, NoCode):
        return ""
    found = _LAUNCHED.search(text)
    return found[1] if found else ""
