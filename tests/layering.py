"""Reads the imports and calls of a source tree and says which ones break the house's rules.

The rules are those of the design: imports point down, foreign packages stay behind their fence, one
door for launches, one for host copies. `test_layering.py` applies them to `src/hypocenter`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "hypocenter"

WORDS = frozenset(
    {
        "errors",
        "records",
        "recording",
        "diagnosis",
        "ring",
        "ring_write",
        "trace_log",
        "tensor",
        "config",
        "package",
        "bundle",
        "bundle_json",
    }
)
FLOORS = ("words", "device", "kernels", "model", "engine", "server", "forensics", "lab", "cli")

#: Floor to the floors it may import, besides itself.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "words": frozenset(),
    "device": frozenset({"words"}),
    "kernels": frozenset({"words", "device"}),
    "model": frozenset({"words", "device", "kernels"}),
    "engine": frozenset({"words", "device", "kernels", "model"}),
    "server": frozenset({"words", "engine"}),
    "forensics": frozenset({"words"}),
    "lab": frozenset(FLOORS) - {"cli"},
    "cli": frozenset({*FLOORS, "package"}),
    # `__init__.py`: what it imports eagerly; inside a function it may import anything.
    "package": frozenset({"words"}),
}

#: Beginnings of file names that may import more floors than their own floor may.
FILE_MAY_ALSO_IMPORT: dict[str, frozenset[str]] = {
    "forensics/replay": frozenset({"device", "kernels"}),
    "forensics/check": frozenset({"device", "kernels"}),
    "forensics/kernel_": frozenset({"device", "kernels"}),
    "forensics/rundiff": frozenset({"device", "kernels"}),
    "forensics/causes_contract": frozenset({"device", "kernels"}),
    "forensics/causes_limits": frozenset({"device"}),
    "forensics/audit": frozenset({"model", "engine"}),
}

#: Foreign package to the files or folders (ending in /) that may import it.
FENCES: dict[str, tuple[str, ...]] = {
    "numba": ("device/lang.py", "device/code_cache.py"),
    "llvmlite": ("device/lang.py",),
    "triton": ("device/gpu_lang.py",),
    "torch": (
        "device/gpu.py",
        "device/interpret",
        "device/limits.py",
        "device/sim",
        "forensics/check",
        "forensics/replay",
    ),
    "starlette": ("server/",),
    "uvicorn": ("server/",),
    "prometheus_client": ("server/",),
    "cyclopts": ("cli",),
    "rich": ("cli",),
    "transformers": (),
    "llama_cpp": (),
    "pickle": (),
}

#: File to foreign packages it must not import, although its floor may.
FILE_MUST_NOT_IMPORT = {"model/decoder.py": frozenset({"numpy", "torch"})}

LAUNCH_FLOORS = frozenset({"device", "kernels", "model", "engine"})
LAUNCH_DOOR = frozenset({"device/launch.py", "device/lang.py"})

#: Where an array is data on its way through a step. Elsewhere `.tolist()` handles facts of a file.
COPY_WATCHED = ("kernels/", "model/decoder.py", "engine/runner.py")
#: `file:function` to the reason why its calls are no copies from a device.
COPY_ALLOWED = dict.fromkeys(
    ("engine/runner.py:_last", "engine/runner.py:_within"),
    "reads the batch, which the host has made",
)
COPY_CALLS = frozenset({"cpu", "item", "tolist", "numpy"})


def findings(root: Path) -> list[str]:
    """Every broken rule below `root`, the folder of the package, as `file:line what`."""
    found: list[str] = []
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_bytes(), str(path))
        name = path.relative_to(root).as_posix()
        for line, problem in sorted({*_imports(root, name, tree), *_doors(name, tree)}):
            found.append(f"{name}:{line} {problem}")
    return found


def floor_of(name: str) -> str:
    """The floor that a file (path below the package) or a module's first name belongs to."""
    first = name.split("/")[0].removesuffix(".py")
    if first in WORDS:
        return "words"
    if first in ("cli", "__main__") or first.startswith("cli_"):
        return "cli"
    return "package" if first in ("__init__", "") else first


def imported_modules(root: Path, name: str, node: ast.AST) -> Iterator[str]:
    """Dotted absolute names that an import statement of file `name` loads; empty for other nodes.

    `from hypocenter import engine` gives hypocenter.engine when that is a module.
    """
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        folders = [PACKAGE, *Path(name).parts[:-1]]
        base = ".".join(folders[: len(folders) - node.level + 1]) if node.level else ""
        module = ".".join(part for part in (base, node.module) if part)
        for alias in node.names:
            inner = root.joinpath(*module.split(".")[1:], alias.name)
            is_module = module.split(".")[0] == PACKAGE and (
                inner.is_dir() or inner.with_suffix(".py").is_file()
            )
            yield f"{module}.{alias.name}" if is_module else module
    elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
        argument = node.args[0] if node.args else None
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def _imports(root: Path, name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    floor = floor_of(name)
    if floor not in MAY_IMPORT:
        yield 1, f"lies on no floor of the house; known are {', '.join(FLOORS)}"
        return
    also = (floors for start, floors in FILE_MAY_ALSO_IMPORT.items() if name.startswith(start))
    allowed = MAY_IMPORT[floor].union({floor}, *also)
    nodes = _eager_nodes(tree) if name == "__init__.py" else ast.walk(tree)
    for node in nodes:
        for module in imported_modules(root, name, node):
            line: int = node.lineno  # type: ignore[attr-defined]
            if module.split(".")[0] == PACKAGE:
                target = floor_of("/".join(module.split(".")[1:]))
                if target not in allowed:
                    yield line, f"({floor}) may not import {module} ({target})"
            elif not _fence_open(name, module.split(".")[0]):
                yield line, f"({floor}) may not import {module}"


def _fence_open(name: str, package: str) -> bool:
    if package in FILE_MUST_NOT_IMPORT.get(name, frozenset()):
        return False
    return package not in FENCES or name.startswith(FENCES[package])


def _eager_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: not function bodies, not `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def _doors(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    launches = floor_of(name) in LAUNCH_FLOORS and name not in LAUNCH_DOOR
    kernels = _kernel_names(tree) if launches else frozenset()
    tables = _dictionary_names(tree) if launches else frozenset()
    copies = name.startswith(COPY_WATCHED)
    free = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and f"{name}:{node.name}" in COPY_ALLOWED
        for inner in ast.walk(node)
    }
    # Inside a GPU kernel a call of another one is device code, which Triton inlines.
    on_device = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and name.endswith("_gpu.py") and node.name in kernels
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if launches and isinstance(node.func, ast.Subscript) and not _in(node.func, tables):
            yield node.lineno, f"launches {ast.unparse(node.func)}; that is device/launch.py's work"
        if launches and id(node) not in on_device and _is_kernel_call(node, kernels):
            yield node.lineno, f"calls kernel {ast.unparse(node.func)}; launch it instead"
        if copies and id(node) not in free and _is_host_copy(node):
            yield (
                node.lineno,
                f"copies to the host by {ast.unparse(node.func)}; use device/memory.py",
            )


def _kernel_names(tree: ast.Module) -> frozenset[str]:
    """Names that hold a kernel: decorated as one here, or imported from a file of CPU kernels."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            marks = [m.func if isinstance(m, ast.Call) else m for m in node.decorator_list]
            words = {word for mark in marks for word in ast.unparse(mark).split(".")}
            if words & {"cpu_kernel", "allocating_kernel", "gpu_kernel", "jit"}:
                names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").endswith("_cpu"):
            names |= {a.asname or a.name for a in node.names if a.name.strip("_").endswith("_cpu")}
    return frozenset(names)


def _dictionary_names(tree: ast.Module) -> frozenset[str]:
    """Names of the file's constant tables: `READERS[dtype](raw)` picks a function, no grid."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def _in(node: ast.Subscript, names: frozenset[str]) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in names


def _is_kernel_call(node: ast.Call, kernels: frozenset[str]) -> bool:
    if isinstance(node.func, ast.Name):
        return node.func.id in kernels
    # The two compiled forms of a CpuKernel.
    return isinstance(node.func, ast.Attribute) and node.func.attr in ("serial", "shared")


def _is_host_copy(node: ast.Call) -> bool:
    if not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr in COPY_CALLS:
        return True
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    return node.func.attr == "to" and any(
        isinstance(v, ast.Constant) and str(v.value).startswith("cpu") for v in values
    )


def _called_name(node: ast.Call) -> str:
    return ast.unparse(node.func).split(".")[-1]
