"""Atheris target for the GGUF reader; `scripts/test-fuzz` runs it.

Anything but a good read or a proper BadModelFile stops the run and leaves the input that did it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
with atheris.instrument_imports(include=["hypocenter.model"]):
    from models.gguf_exercise import TRIED, refusal
    from models.gguf_files import GGUFWriter, every_tensor, every_value


def seeds(folder: Path) -> None:
    """Small valid files to start from: the fuzzer finds the format faster from these."""
    folder.mkdir(parents=True, exist_ok=True)
    values, tensors = every_value(), every_tensor()
    for version in (2, 3):
        (folder / f"all-{version}").write_bytes(GGUFWriter(version=version).build(values, tensors))
    for field in values:
        (folder / f"key-{field[0]!s}").write_bytes(GGUFWriter().build([field]))
    for tensor in tensors:
        (folder / f"tensor-{tensor.name}").write_bytes(GGUFWriter().build([], [tensor]))


def main() -> None:
    """Arguments are libFuzzer's: a corpus folder, `-max_total_time=120`, or one input to repeat."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"

        def one_input(data: bytes) -> None:
            refusal(path, data)
            TRIED.clear()

        corpus = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
        if corpus and corpus[0].is_dir():
            seeds(corpus[0])
        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
