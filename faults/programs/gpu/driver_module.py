"""A module that is loaded and launched by the driver's own functions; `right` has room for it.

The kernel writes `columns` to a row, and the rows were made for fewer.
"""

# mypy: ignore-errors
import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = r"""
extern "C" __global__ void rows(float* out, int columns) {
    for (int c = threadIdx.x; c < columns; c += blockDim.x)
        out[(size_t)blockIdx.x * columns + c] = 1.0f;
}
"""


def main(right):
    torch.zeros(1, device="cuda")
    folder = Path(tempfile.mkdtemp())
    (folder / "rows.cu").write_text(SOURCE)
    command = ["nvcc", "-lineinfo", "-arch=native", "-cubin", "-o", "rows.cubin", "rows.cu"]
    subprocess.run(command, cwd=folder, check=True)
    driver = ctypes.CDLL("libcuda.so.1")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    code = (folder / "rows.cubin").read_bytes()
    assert driver.cuModuleLoadData(ctypes.byref(module), code) == 0
    assert driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"rows") == 0
    columns = 64 if right else 65536
    out = torch.zeros(4096, 64, device="cuda")
    given = ctypes.c_void_p(out.data_ptr()), ctypes.c_int(columns)
    pointers = (ctypes.c_void_p * 2)(*map(ctypes.addressof, given))
    assert driver.cuLaunchKernel(kernel, 4096, 1, 1, 128, 1, 1, 0, None, pointers, None) == 0
    torch.cuda.synchronize()
    print("sum", out.sum().item())


main("right" in sys.argv)

# /// truth
# causes = ["buffer too small", "scalar out of range", "wrong stride"]
# kernels = ["rows"]
# arguments = ["out", "columns", "parameter 0", "parameter 1"]
# lines = ["* columns + c]"]
# fix = 'larger|room|columns|bound'
# never = '\bmask\b'
# options = ["--again"]
# needs_gpu = true
# ///
