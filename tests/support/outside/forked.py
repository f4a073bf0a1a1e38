"""Scripts in a fork of a process that has loaded torch and Triton: 20 ms each, and not two seconds.

For what a script does, not for how an interpreter starts. Kernels run in Triton's interpreter. As
a program this file is that process: it reads requests and writes how each ended, line by line.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any


def run_forked(file: Path, folder: Path, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    """What `python FILE` gives in `folder`. Raises TimeoutError after so many seconds."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    out, err = (file.with_suffix(f".{name}") for name in ("stdout", "stderr"))
    server.stdin.write(json.dumps([str(file), str(folder), str(out), str(err)]) + "\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], seconds)[0]:
        raise TimeoutError(f"{file} has not ended after {seconds} s")
    code = os.waitstatus_to_exitcode(int(server.stdout.readline()))
    return subprocess.CompletedProcess([str(file)], code, out.read_text(), err.read_text())


@cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    server = subprocess.Popen(
        [sys.executable, __file__], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    atexit.register(server.kill)
    return server


def _serve() -> None:
    import torch  # noqa: F401
    import triton.language  # noqa: F401

    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _become(*json.loads(line))
        print(os.waitpid(child, 0)[1], flush=True)


def _become(file: str, folder: str, out: str, err: str) -> None:
    code: Any = 0
    try:
        for number, name in ((1, out), (2, err)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
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
    _serve()
