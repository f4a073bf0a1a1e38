"""Stands for Triton's CUDA driver, and for torch's, on a machine with an H200; loads nothing."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN201, ANN204
import types

import torch
from triton.backends.compiler import GPUTarget

torch.cuda.current_device = lambda: 0
torch.cuda.current_stream = lambda device=0: types.SimpleNamespace(cuda_stream=0)


class Driver:
    def __init__(self, num_threads, load_error):
        facts = {"max_shared_mem": 232448, "multiprocessor_count": 132}
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: facts, load_binary=self.load
        )
        self.num_threads, self.load_error = num_threads, load_error

    def load(self, *args):
        if self.load_error:
            raise RuntimeError(self.load_error)
        return None, None, 32, 0, self.num_threads

    def launcher_cls(self, source, metadata):
        return lambda *args: None

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0
