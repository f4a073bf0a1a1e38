"""Kernels of CUDA's own language for the programs beside this: compiled once, called by ctypes."""

# mypy: ignore-errors
import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path


def library(source):
    """The shared library of a source; one process compiles it, and the others find it."""
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"hypo-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder / f"{name}.so"
    if not made.exists():
        (folder / f"{name}.cu").write_text(source)
        part = f"{made}.{os.getpid()}"
        options = ["-lineinfo", "-arch=native", "-shared", "-Xcompiler", "-fPIC", "-cudart=shared"]
        subprocess.run(["nvcc", *options, "-o", part, f"{folder}/{name}.cu"], check=True)
        Path(part).rename(made)
    return ctypes.CDLL(str(made))


def address(tensor):
    """The address of a tensor, as an argument of a call."""
    return ctypes.c_void_p(tensor.data_ptr())
