"""The process in which this package's own kernels are compiled: `hypo kernels` starts it."""

from __future__ import annotations

from collections.abc import Sequence

from hypocenter.check.compile_worker import serve
from hypocenter.device.offline.specimen import Specimen


def main() -> None:
    """Compile what is asked for until stdin ends."""
    serve(lambda: (_own_specimens(), ""))


def _own_specimens() -> Sequence[Specimen]:
    # What is missing for that is an answer of this process.
    from hypocenter.model.offline.specimens import project_specimens

    return project_specimens()


if __name__ == "__main__":
    main()
