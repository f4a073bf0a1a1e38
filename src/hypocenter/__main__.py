"""`python -m hypocenter` is the command `hypo`; what comes before the command can be interrupted.

Imports next to nothing, so that Ctrl-C finds its handler in place as early as can be.
"""

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
from typing import NoReturn


def main() -> None:
    """Load and run the command line; ends the process."""
    if why_not := platform_problem(sys.platform):
        sys.exit(f"hypo: {why_not}")
    # Where Ctrl-C is ignored (a command in the background of a script), it stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    if sys.argv[1:2] == ["serve"]:
        from hypocenter.cli import early

        early.begin(sys.argv[2:])
    if sys.argv[1:2] == ["run"]:
        gc.disable()  # what a start makes stays; looking for circles in it takes a tenth of a start
    from hypocenter.cli import app

    try:
        app.main()
    except SystemExit as ended:
        _end(ended.code)


def platform_problem(system: str) -> str:
    """Why nothing runs on a system, named as `sys.platform` has it; nothing where all does.

    Elsewhere the locks, the shared memory and the limits of helpers are missing or differ.
    """
    if system == "linux":
        return ""
    names = {"darwin": "macOS", "win32": "Windows"}
    way_out = "use WSL 2" if system == "win32" else "use a container or a virtual machine"
    return f"this is {names.get(system, system)}, but hypocenter runs on Linux only; {way_out}"


def _end(code: object) -> NoReturn:
    """End without taking everything apart first, which a compiler's objects need 0.3 s for.

    What has asked to be called at the end is called, and what was printed is out.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python itself does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def _leave(number: int, frame: object) -> NoReturn:
    os.write(2, b"hypo: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
