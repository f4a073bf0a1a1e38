"""What launchers put before lines is taken off, and nothing else is."""

from __future__ import annotations

import itertools

import pytest
from pretended.runtime_words import ASSERTED, AUTOTUNER, CAPTURE, COMPILE, NO_CODE, RESOURCES

from hypocenter.base.refusals import NoCode, ResourceExceeded
from hypocenter.watch.fault_text import (
    fatal_error,
    fault_in,
    innermost_call,
    is_fault,
    stack_in,
    waiting_calls,
)
from hypocenter.watch.gpu_dumps import GpuDumps
from hypocenter.watch.launcher_lines import split_prefix, without_prefixes

#: As each of them really writes, with the programs that do.
PREFIXES = {
    "vLLM, engine": "(EngineCore_DP0 pid=4211) ERROR 06-10 15:17:21 [core.py:708] ",
    "vLLM, worker": "(VllmWorker rank=0 pid=4300) ",
    "vLLM, newer": "(Worker_TP1 pid=77) INFO 06-10 15:17:21 [v1/worker/gpu_worker.py:12] ",
    "torchrun": "[default0]:",
    "torch": "[rank12]: ",
    "torch, C++": "[rank0]:[E610 15:17:21.123456789 ProcessGroupNCCL.cpp:616] ",
    "mpirun": "[1,3]<stderr>:",
    "Ray": "(pid=1234) ",
    "Ray, worker": "(RayWorkerWrapper pid=1234, ip=10.0.0.7) ",
    "Ray, coloured": "\x1b[36m(ServeReplica:app:Model pid=99)\x1b[0m ",
    "compose": "vllm-1  | ",
    "compose 1": "model_server_1     | ",
    "compose, named": "vllm  | ",
    "kubectl": "[pod/vllm-7d9f-abc12/server] ",
    "container": "2026-06-10T15:17:21.123456789Z stderr F ",
    "docker -t": "2026-06-10T15:17:21.123456789Z ",
    "journald": "Jun 10 15:17:21 node7 vllm[4211]: ",
    "journald, iso": "2026-06-10T15:17:21+0200 node7 python3.12[4211]: ",
    "logging": "2026-06-10 15:17:21,123 - engine.core - ERROR - ",
    "logging, short": "2026-06-10 15:17:21,123 ERROR ",
    "brackets": "[2026-06-10 15:17:21,123] [ERROR] [launch.py:325:sigkill_handler] ",
    "SGLang": "[2026-06-10 15:17:21 DP0 TP3] ",
    "glog": "E0610 15:17:21.123456  4211 executor.cc:12] ",
    "loguru": "2026-06-10 15:17:21.123 | ERROR    | app.main:run:12 - ",
}
AMD = (
    "Memory access fault by GPU node-1 (Agent handle: 0x55cd82c07cd0) on address 0x7f3a12345000. "
    "Reason: Page not present or supervisor privilege.\n"
)
QUEUE = (
    ":0:rocdevice.cpp            :3018: 51230472211d us:  Callback: Queue 0x7f1c30c00000 aborting "
    "with error : HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION: The agent attempted to access memory "
    "beyond the largest legal address. code: 0x29\n"
)
OBJECTS = (
    ":1:hip_fatbin.cpp           :687 : 98364963532 us:  No compatible code objects found for: "
    "gfx1152, value of HIP_FORCE_SPIRV_CODEOBJECT: 0\n"
)
CLR_FAULT = (
    ":0:rocdevice.cpp            :3678: 11343484349 us:  Memory Fault Error [host: node7, GPU "
    "index: 0, faulting addr: 0x7f7d37c00000, kernel: rope_kernel(float*, int const*)]\n"
)
GGML = (
    "ROCm error: an illegal memory access was encountered\n"
    "  current device: 0, in function ggml_backend_cuda_synchronize at ggml-cuda.cu:2946\n"
)
NO_BINARY = (
    ":1:hip_code_object.cpp      :505 : 221750325578 us: 1255284: [tid:0x7fcc46391bc0] "
    "hipErrorNoBinaryForGpu: Unable to find code object for all current devices!\n"
    ":1:hip_code_object.cpp      :509 : 221750325581 us: 1255284: [tid:0x7fcc46391bc0]     "
    "amdgcn-amd-amdhsa--gfx1100 - [Found]\n"
    ":1:hip_code_object.cpp      :509 : 221750325582 us: 1255284: [tid:0x7fcc46391bc0]     "
    "amdgcn-amd-amdhsa--gfx1036 - [Not Found]\n"
)
STACK = (
    "Fatal Python error: Segmentation fault\n\nThread 0x00007f (most recent call first):\n"
    '  File "/home/ann/queue.py", line 7 in get\n\n'
    'Current thread 0x00008f (most recent call first):\n  File "/home/ann/memory.py", line 294 in '
    "_ask\n"
)
KNOWN = {
    "resources": RESOURCES,
    "autotuner": AUTOTUNER,
    "compiler": COMPILE,
    "assertion": ASSERTED,
    "no code": NO_CODE,
    "capture": CAPTURE,
    "AMD": AMD,
    "queue": QUEUE,
    "objects": OBJECTS,
    "CLR's fault": CLR_FAULT,
    "ggml": GGML,
    "no binary": NO_BINARY,
    "stack": STACK,
    "hang": "HW Exception by GPU node-2 (Agent handle: 0x1) reason :GPU Hang\n",
    "logits": "hypo: m.gguf: logits row 0: 12 of 512 values are NaN or +inf; hypo inspect\n",
    "ours": "hypo: cuda:1: invalid argument (copy_in)\n",
    "memory": "ValueError: x\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GB\n",
}


def _behind(text: str, *prefixes: str) -> str:
    """Each line behind the prefixes, as a launcher writes it; an empty one may lose its blank."""
    before = "".join(prefixes)
    return "".join(f"{before}{line}".rstrip() + "\n" for line in text.splitlines())


def _facts(text: str) -> tuple[object, ...]:
    return (
        fault_in(text, 1, None),
        fault_in(text, None, 6),
        is_fault(text, 1, None),
        fatal_error(text),
        innermost_call(text),
        waiting_calls(text),
        stack_in(text),
    )


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_line_says_the_same_behind_one_prefix_or_two(name: str) -> None:
    text = "".join(line.rstrip() + "\n" for line in KNOWN[name].splitlines())
    plain = _facts(text)
    for first, second in itertools.product(["", *PREFIXES.values()], PREFIXES.values()):
        assert _facts(_behind(text, first, second)) == plain, (first, second)


@pytest.mark.parametrize("name", PREFIXES)
def test_a_prefix_goes_and_the_indentation_behind_it_stays(name: str) -> None:
    line = '  File "x.py", line 1'
    assert without_prefixes(PREFIXES[name] + line) == line


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2, 3] is no list of tensors",
        "[[0.5, 1.0], [2.0, 3.0]]",
        "x[rank0]: 7",
        "(a, b) = pid(4)",
        "(the worker of pid=12 has ended)",
        "  [rank0]: indented text of a program",
        "|   0  NVIDIA H100 80GB HBM3  | 00000000:01:00.0 |",
        "total | 12",
        "ERROR: the file is damaged",
        "INFO:     Started server process [4211]",
        "ValueError: [rank0]: is no device",
        "12:30 is lunch",
        "mask | other",
        "2026 tokens",
        "[core] dumped",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory",
        "/pytorch/Indexing.cu:1553: f: block: [63,0,0], thread: [64,0,0] Assertion `a < b` failed.",
        "",
    ],
)
def test_ordinary_text_with_brackets_stays_as_it_is(line: str) -> None:
    assert split_prefix(line) == ("", line)
    assert without_prefixes(line) == line


def test_an_error_behind_a_time_and_a_level_keeps_its_own_name() -> None:
    line = "triton.runtime.errors.OutOfResources: out of resource: threads"
    assert without_prefixes(f"2026-06-10 15:17:21 ERROR {line}") == line
    assert without_prefixes(f"2026-06-10 15:17:21 {line}") == line


def test_lines_of_two_processes_that_came_in_turn_are_two_tracebacks() -> None:
    first, second = RESOURCES.splitlines(), COMPILE.splitlines()
    mixed = []
    for one, other in itertools.zip_longest(first, second):
        mixed += [f"[rank0]: {one}"] if one is not None else []
        mixed += [f"[rank1]: {other}"] if other is not None else []
    fault = fault_in("\n".join(mixed), 1, None)
    assert isinstance(fault.refusal, ResourceExceeded)
    assert (fault.kernel, fault.site) == ("attention_fwd", "/home/ann/train.py:61")


def test_a_queue_that_amds_runtime_gave_up_is_told_in_its_words() -> None:
    fault = fault_in(QUEUE, None, 6)
    assert fault.kind == "crash"
    assert fault.error == (
        "HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION: The agent attempted to access memory beyond "
        "the largest legal address."
    )
    assert "SIGABRT" not in fault.message


def test_a_file_without_code_for_an_amd_gpu_is_told_as_that() -> None:
    fault = fault_in(OBJECTS, None, 11)
    assert isinstance(fault.refusal, NoCode)
    assert fault.refusal.wanted == "gfx1152"
    assert "host's own memory" not in fault.message


def test_what_a_debug_agent_prints_is_read_behind_a_prefix() -> None:
    text = (
        "wave_1: pc=0x7f0000001000 (kernel_code_entry=0x7f0000000f00 <scale>)"
        " (stopped, reason: MEMORY_VIOLATION)\n"
    )
    plain, _ = GpuDumps().stops(text)
    behind, _ = GpuDumps().stops(_behind(text, "[rank0]: "))
    assert plain
    assert behind == plain
