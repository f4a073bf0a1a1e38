"""`python -m hypocenter` is the command `hypo`; what comes before the command can be interrupted.

Imports next to nothing, so that Ctrl-C finds its handler in place as early as can be.
"""

import os
import signal
from typing import NoReturn


def main() -> None:
    """Load and run the command line; leaves by SystemExit."""
    # Where Ctrl-C is ignored (a command in the background of a script), it stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from hypocenter.cli import app

    app.main()


def _leave(number: int, frame: object) -> NoReturn:
    os.write(2, b"hypo: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
