"""Scripts in a fork of a process that has loaded torch and Triton: 20 ms each, and not two seconds.

For what a script does, not for how an interpreter starts. Kernels run in Triton's interpreter, if
nothing else is asked. As a program this file is that process: it reads requests and writes how each
ended, line by line.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

#: Of each process that forks, by its id: what it and its forks took of the processor so far.
_seconds: dict[int, float] = {}


def seconds_of_forks() -> float:
    """Processor seconds of all forks and of the processes that they come from."""
    return sum(_seconds.values())


def run_forked(
    file: Path,
    folder: Path,
    seconds: float = 100,
    *,
    environ: Mapping[str, str] | None = None,
    loads: tuple[str, ...] = (),
    is_interpreted: bool = True,
) -> subprocess.CompletedProcess[str]:
    """What `python FILE` gives in `folder`, with `environ` added to the environment.

    `loads` are modules that it finds loaded. Raises TimeoutError after so many seconds.
    """
    server = _server(loads, is_interpreted=is_interpreted)
    assert server.stdin is not None
    assert server.stdout is not None
    out, err = (file.with_suffix(f".{name}") for name in ("stdout", "stderr"))
    request = [str(file), str(folder), str(out), str(err), dict(environ or {})]
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], seconds)[0]:
        raise TimeoutError(f"{file} has not ended after {seconds} s")
    status, took = server.stdout.readline().split()
    code, _seconds[server.pid] = os.waitstatus_to_exitcode(int(status)), float(took)
    return subprocess.CompletedProcess([str(file)], code, out.read_text(), err.read_text())


@cache
def _server(loads: tuple[str, ...], *, is_interpreted: bool) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("PYTHONPATH", "TRITON_INTERPRET"):
        environment.pop(name, None)
    if is_interpreted:
        environment["TRITON_INTERPRET"] = "1"
    server = subprocess.Popen(
        [sys.executable, __file__, "torch", "triton.language", *loads], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    atexit.register(server.kill)
    return server


def _serve(loads: list[str]) -> None:
    for module in loads:
        importlib.import_module(module)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _become(*json.loads(line))
        status = os.waitpid(child, 0)[1]
        print(status, sum(os.times()[:4]), flush=True)


def _become(file: str, folder: str, out: str, err: str, environ: dict[str, str]) -> None:
    code: Any = 0
    try:
        for number, name in ((1, out), (2, err)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        os.environ.update(environ)
        sys.argv, sys.path[0] = [file], os.path.dirname(file)
        runpy.run_path(file, run_name="__main__")
    except SystemExit as left:
        code = left.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    _serve(sys.argv[1:])
