"""Each kernel says in its docstring what it computes, of arguments of which shapes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from hypocenter.base import package

_PARTS = re.compile(
    r"(Formula|Shapes|Source): (.*?)(?=\n(?:Formula|Shapes|Source): |\n\n|\Z)", re.S
)
GOOD = '''
@triton.jit
def twice_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Formula: out = 2 x.
    Shapes: x and out f32 [num_rows, width].
    """
'''


GOOD_ON_CPU = '''
@cpu_kernel
def twice(x: Any, out: Any, width: int) -> None:
    """Formula: out = 2 x.
    Shapes: x and out f32 [num_rows, width].
    """
'''


def _kernels(text: str) -> Iterator[ast.FunctionDef]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
            yield node


def _cpu_kernels(text: str) -> Iterator[ast.FunctionDef]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(decorator) in ("cpu_kernel", "allocating_kernel")
            for decorator in node.decorator_list
        ):
            yield node


def _missing(kernel: ast.FunctionDef) -> list[str]:
    """What the docstring of a kernel does not say: its formula, or the shapes of an argument."""
    parts = dict(_PARTS.findall(ast.get_docstring(kernel) or ""))
    missing = [] if "=" in parts.get("Formula", "") else ["a formula"]
    shapes = parts.get("Shapes", "") if "[" in parts.get("Shapes", "") else ""
    names = [
        arg.arg.removesuffix("_ptr")
        for arg in kernel.args.args
        # An array of a kernel for the CPU is of any type to mypy.
        if arg.arg.endswith("_ptr") or (arg.annotation and ast.unparse(arg.annotation) == "Any")
    ]
    return missing + [name for name in names if not re.search(rf"\b{name}\b", shapes)]


def test_each_kernel_has_a_formula_and_the_shapes_of_its_arguments() -> None:
    found = {
        kernel.name: _missing(kernel)
        for file in package.gpu_kernel_files()
        for kernel in _kernels(file.read_text())
    }
    assert {name: missing for name, missing in found.items() if missing} == {}
    assert len(found) > 60


def test_each_kernel_for_the_cpu_has_them_too() -> None:
    found = {
        kernel.name: _missing(kernel)
        for file in package.module_files("kernels")
        for kernel in _cpu_kernels(file.read_text())
    }
    assert {name: missing for name, missing in found.items() if missing} == {}
    assert len(found) > 35


def test_a_kernel_for_the_cpu_without_them_is_found() -> None:
    (kernel,) = _cpu_kernels(GOOD_ON_CPU)
    assert _missing(kernel) == []
    (kernel,) = _cpu_kernels(GOOD_ON_CPU.replace("x and out f32", "x f32"))
    assert _missing(kernel) == ["out"]
    (kernel,) = _cpu_kernels(GOOD_ON_CPU.replace("out = 2 x", "twice x"))
    assert _missing(kernel) == ["a formula"]


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("Formula: out = 2 x.", "Twice as much.", ["a formula"]),
        ("out = 2 x", "twice x", ["a formula"]),
        ("x and out f32", "x f32", ["out"]),
        ("[num_rows, width]", "as everywhere", ["x", "out"]),
        ('"""', "'''", []),
    ],
)
def test_a_kernel_without_one_of_them_is_found(old: str, new: str, missing: list[str]) -> None:
    (kernel,) = _kernels(GOOD)
    assert _missing(kernel) == []
    (kernel,) = _kernels(GOOD.replace(old, new))
    assert _missing(kernel) == missing
