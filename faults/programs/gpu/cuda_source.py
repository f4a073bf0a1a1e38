"""A kernel of CUDA's own language, compiled here with line information; it writes out of bounds."""

# mypy: ignore-errors
import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = r"""
extern "C" __global__ void scatter(const long* ids, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[ids[i]] = 1.0f;
}

extern "C" int launch(const long* ids, float* out, int n) {
    scatter<<<(n + 127) / 128, 128>>>(ids, out, n);
    return (int)cudaGetLastError();
}
"""


def main():
    folder = Path(tempfile.mkdtemp())
    (folder / "scatter.cu").write_text(SOURCE)
    subprocess.run(
        [
            "nvcc",
            "-lineinfo",
            "-arch=native",
            "-shared",
            "-Xcompiler",
            "-fPIC",
            "-cudart=shared",
            "-o",
            "scatter.so",
            "scatter.cu",
        ],
        cwd=folder,
        check=True,
    )
    library = ctypes.CDLL(str(folder / "scatter.so"))
    ids = torch.arange(1024, device="cuda")
    ids[700] = 1 << 38
    out = torch.zeros(1024, device="cuda")
    code = library.launch(ctypes.c_void_p(ids.data_ptr()), ctypes.c_void_p(out.data_ptr()), 1024)
    print("launched", code)
    torch.cuda.synchronize()
    print(out.sum().item())


main()

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["scatter"]
# arguments = ["ids", "parameter 0"]
# lines = ["out[ids[i]]"]
# fix = 'inside|below|<|range|index'
# options = ["--again"]
# needs_gpu = true
# ///
