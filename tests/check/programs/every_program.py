"""Runs these programs in one process: a check of all of them starts torch once."""

# mypy: ignore-errors
import runpy
from pathlib import Path

if __name__ == "__main__":
    for name in ("pool", "same_programs", "strides"):
        runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
