"""Which files hold AMD's code or launches of it, by how their names end."""

from __future__ import annotations

from pathlib import Path

SOURCES = (".hip", ".cpp", ".cu", ".cc")
OBJECTS = (".hsaco", ".co", ".bundle", ".o")
LAUNCHES = ".toml"


def is_machine_file(path: Path) -> bool:
    """Whether a file holds HIP, machine code, or launches of it."""
    return path.suffix in (*SOURCES, *OBJECTS, LAUNCHES)
