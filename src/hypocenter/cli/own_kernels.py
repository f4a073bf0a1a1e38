"""The process in which this package's own kernels are compiled: `hypo kernels` starts it."""

from __future__ import annotations

from hypocenter.check.compile_worker import serve


def main() -> None:
    """Compile what is asked for until stdin ends."""
    from hypocenter.model.offline.specimens import project_specimens

    serve(lambda: (project_specimens(), ""))


if __name__ == "__main__":
    main()
