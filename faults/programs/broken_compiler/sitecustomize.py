"""A Triton for NVIDIA whose code is wrong where a loop has stages: its first product is a sum.

On PYTHONPATH it is there in every process, that of the doctor as well.
"""

import importlib.abc
import importlib.util
import re
import sys

MODULE = "triton.backends.nvidia.compiler"


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_broken(module):
            load(module)
            plant(module.CUDABackend)

        spec.loader.exec_module = load_broken
        return spec


def plant(backend):
    make = backend.make_ptx

    def make_wrong(self, src, metadata, options, *rest):
        text = make(self, src, metadata, options, *rest)
        if options.num_stages == 1:
            return text
        return re.sub(r"\bmul((?:\.rn)?\.f32)", r"add\1", text, count=1)

    backend.make_ptx = make_wrong


sys.meta_path.insert(0, Finder())
