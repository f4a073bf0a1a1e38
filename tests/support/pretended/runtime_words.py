"""What torch, Triton and drivers print where they refuse something, as they really write it."""

from __future__ import annotations

FRAMES = """Traceback (most recent call last):
  File "/home/ann/train.py", line 80, in <module>
    main()
  File "/home/ann/train.py", line 61, in main
    {line}
"""
TRITON = """  File "/usr/lib/python3.11/site-packages/triton/runtime/jit.py", line 370, in <lambda>
    return lambda *args, **kwargs: self.run(grid=grid, warmup=False, *args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
RESOURCES = (
    FRAMES.format(line="out = attention_fwd[grid](q, k, v, num_stages=4)")
    + TRITON
    + "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 278528, "
    "Hardware limit: 232448. Reducing block sizes or `num_stages` may help.\n"
)
AUTOTUNER = (
    FRAMES.format(line="out = attention_fwd[grid](q, k, v, num_stages=4)")
    + TRITON
    + "triton.runtime.errors.AutotunerError: Autotuner error: No valid autotuner configs after "
    "pruning. `early_config_prune` should return at least one config.\n"
)
#: Of Triton 3.6 on NumPy 2.4.
INTERPRETER = (
    """Traceback (most recent call last):
  File "/opt/lib/python3.12/site-packages/triton/runtime/interpreter.py", line 1357, in __call__
    self.fn(**args)
  File "/home/ann/train.py", line 15, in sum_bags
    for at in range(first, last):
  File "/opt/lib/python3.12/site-packages/triton/runtime/interpreter.py", line 888, in <lambda>
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data))
TypeError: only 0-dimensional arrays can be converted to Python scalars

The above exception was the direct cause of the following exception:

"""
    + FRAMES.format(line="sum_bags[(3,)](table, ids, starts, out, 50)")
    + TRITON
    + "triton.runtime.errors.InterpreterError: TypeError('only 0-dimensional arrays can be "
    "converted to Python scalars')\n"
)
COMPILE = (
    FRAMES.format(line="cast_kernel[(8,)](x, y, n)")
    + TRITON
    + """triton.compiler.errors.CompilationError: at 4:11:
def cast_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    x = x.to(tl.float8e4nv)
           ^
type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')
"""
)
ASSERTIONS = "".join(
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: "
    f"block: [63,0,0], thread: [{thread},0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
    for thread in (64, 65, 66)
)
ASSERTED = (
    ASSERTIONS
    + FRAMES.format(line="loss = model(ids).sum().item()")
    + "torch.AcceleratorError: CUDA error: device-side assert triggered\n"
    "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda for more information.\n"
)
NO_CODE = (
    "/usr/lib/python3.11/site-packages/torch/cuda/__init__.py:235: UserWarning:\n"
    "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current "
    "PyTorch installation.\n"
    "The current PyTorch install supports CUDA capabilities sm_80 sm_86 sm_90.\n"
    + FRAMES.format(line="x = torch.zeros(4, device='cuda') + 1")
    + "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the "
    "device\n"
)
CAPTURE = (
    FRAMES.format(line="norm_kernel[(n,)](x, y, n)")
    + TRITON
    + "RuntimeError: Triton Error [CUDA]: operation not permitted when stream is capturing\n"
    "\nDuring handling of the above exception, another exception occurred:\n\n"
    + FRAMES.format(line="with torch.cuda.graph(graph):")
    + "torch.AcceleratorError: CUDA error: operation failed due to a previous error during "
    "capture\n"
)
