"""A program without a kernel that compiles, for `test_unwritten.py`.

It prints whether torch loads its compiler before anybody asks for it, and in how many pieces the
compiler takes a function to which an operation belongs that it cannot compile: as the program is
run, and with nothing that looks at its operations.
"""

import sys

import torch
from torch.utils._python_dispatch import _disable_current_modes

ones = torch.ones(4)
print("torch._dynamo" in sys.modules)


def positive(x: torch.Tensor) -> bool:
    return x.sin().sum().item() > 0


def num_pieces() -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(positive, backend="eager")(ones)
    return int(torch._dynamo.utils.counters["frames"]["total"])


print(num_pieces())
with _disable_current_modes():
    print(num_pieces())
