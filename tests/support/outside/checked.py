"""`hypo check` in the process of the tests; the file runs in a fork of one that has loaded torch.

A check in a process of its own takes two seconds more; `tests/house/test_examples.py` has one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hypocenter.check import check
from outside.forked import run_forked
from outside.terminal import TIMEOUT_SECONDS, hypo_in_process

_LOADED = (
    "hypocenter.check.launches",
    "hypocenter.check.pretend_gpu",
    "hypocenter.check.runtime",
    "hypocenter.check.stream_order",
    "torch._dynamo",  # torch loads it at the first operation under a mode: a second and a half
)


def hypo_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `hypo check --json` gives."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(check, "subprocess", SimpleNamespace(run=_run_in_fork, DEVNULL=None))
        return hypo_in_process("check", "--json", *arguments)


def _run_in_fork(command: Sequence[Any], **_: Any) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` does there, whose last word is a request."""
    request = command[-1].decode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checked.py"
        file.write_text(f"from hypocenter.check.runtime import main\n\nmain({request!r})\n")
        done = run_forked(
            file,
            Path.cwd(),
            TIMEOUT_SECONDS,
            environ=os.environ,
            loads=_LOADED,
            is_interpreted=False,
        )
    sys.stderr.write(done.stdout + done.stderr)
    return done
