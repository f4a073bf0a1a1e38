"""The watch of a process's driver: machine code that CUPTI calls, and the little that Python adds.

`callback.c` is compiled once and kept in the cache. In Python a call to and from it took 7 us of a
launch, which is too much for programs whose host is the bound.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from hypocenter.base.package import CALLBACK
from hypocenter.foreign.caller import caller_of_now
from hypocenter.foreign.driver.library import DriverLibrary, NotHere
from hypocenter.record.driver_log import DriverLogWriter
from hypocenter.record.driver_run import DriverRefusal
from hypocenter.record.driver_table import header_text, place

log = logging.getLogger("hypocenter.foreign")

MAX_REFUSALS, COMPILE_SECONDS = 64, 30
_COMPILERS = ("cc", "gcc", "clang")
_SITE, _REFUSAL = CFUNCTYPE(c_uint32), CFUNCTYPE(None, c_uint64, c_uint64, c_int)


class DriverWatch:
    """What CUPTI is to call (`callback`), and what that asks of Python.

    `is_noted`: whether a launch is under way of which another recorder notes the line. Raises
    NotHere where there is no C compiler, and OSError.
    """

    def __init__(
        self,
        writer: DriverLogWriter,
        driver: DriverLibrary,
        cache: Path,
        is_noted: Callable[[], bool],
    ) -> None:
        self._writer, self._driver, self._is_noted = writer, driver, is_noted
        self._num_refused = 0
        self._code: Any = ctypes.CDLL(str(compile_callback(cache)))
        self.callback = ctypes.cast(self._code.hypo_callback, c_void_p)
        self._writer.make_table()
        self._asked = _SITE(self._site), _REFUSAL(self._note_refusal)
        self.begin()

    def begin(self) -> None:
        """Write from now on, into the writer's table as it is now."""
        mapped = (ctypes.c_char * len(self._writer.table)).from_buffer(self._writer.table)
        thread = ctypes.cast(ctypes.pythonapi.PyGILState_GetThisThreadState, c_void_p)
        tell = (
            self._driver.address("cuFuncGetParamInfo"),
            self._driver.address("cuKernelGetParamInfo"),
        )
        self._code.hypo_begin(ctypes.byref(mapped), *tell, thread, *self._asked)
        self._mapped = mapped

    def end(self) -> None:
        """Write nothing from now on, whatever still calls."""
        self._code.hypo_end()

    def _site(self) -> int:
        """The number of the line at which this thread is; 0 where it is not known."""
        with contextlib.suppress(Exception):  # what is raised in here ends up nowhere
            return 0 if self._is_noted() else self._writer.site(_line())
        return 0

    def _note_refusal(self, at: int, function: int, code: int) -> None:
        """The driver's answer was no success: of this launch, or of what ran before it."""
        self._num_refused += 1
        if self._num_refused > MAX_REFUSALS:
            return
        try:
            name, sentence = self._driver.error(code)
            self._writer.note_refusal(
                DriverRefusal(
                    seq=place(self._writer.table, at),
                    code=code,
                    name=name,
                    sentence=sentence,
                    limits=self._driver.limits(function),
                )
            )
        except Exception as error:
            log.warning("a refusal of the driver was not recorded: %r", error)


def _line() -> str:
    return caller_of_now(sys._getframe(2))[1]


def compile_callback(cache: Path) -> Path:
    """The machine code of `callback.c`, compiled for this Python's machine if that was not done.

    Raises NotHere where there is no compiler, or it fails.
    """
    source = CALLBACK.read_bytes()
    header = header_text().encode()
    name = hashlib.sha256(source + header + os.uname().machine.encode()).hexdigest()[:16]
    folder = cache / "driver"
    made = folder / f"callback-{name}.so"
    if made.is_file():
        return made
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NotHere(f"it takes a C compiler, and none of {', '.join(_COMPILERS)} is on PATH")
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        below = Path(work)
        (below / "callback.c").write_bytes(source)
        (below / "table.h").write_bytes(header)
        command = [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", "out.so", "callback.c"]
        try:
            ran = subprocess.run(
                command,
                cwd=below,
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotHere(f"{compiler} did not compile callback.c: {error}") from error
        if ran.returncode:
            said = " ".join(ran.stderr.split())[:300]
            raise NotHere(f"{compiler} did not compile callback.c: {said}")
        (below / "out.so").rename(made)
    return made
