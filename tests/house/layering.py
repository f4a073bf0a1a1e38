"""Reads the imports and calls of a source tree and says which ones break the house's rules.

The rules are those of the design: a room imports the rooms that it may, foreign packages stay
behind their fence, one door for launches, one for host copies. `test_layering.py` applies them to
`src/hypocenter`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parsed import nodes_of, tree_of

PACKAGE = "hypocenter"

#: Room, a folder below the package, to the rooms that it may import besides itself. What is true
#: of a room is true of the folders in it. Every room may import base.
MAY_IMPORT: dict[str, frozenset[str]] = {
    room: frozenset({"base", *others.split()}) - {room}
    for room, others in {
        "base": "",
        "conversation": "",
        "settings": "conversation",
        "wire": "conversation settings",
        "record": "settings",
        "order": "record",
        "trace": "",
        "coredump": "record",
        "watch": "settings record coredump",
        "contracts": "settings record",
        "device": "settings wire record coredump",
        # The instrument: it explains any program, and knows nothing of the engine.
        "foreign": "settings record order device",
        "replay": "record contracts device",
        "check": "record order device foreign replay",
        "doctor": "settings record order contracts device replay",
        # The engine.
        "kernels": "settings wire record contracts device",
        "hub": "settings",
        "model": "settings wire conversation device kernels hub trace",
        "engine": "settings wire conversation record device kernels model trace",
        "worker": "settings wire record device model engine",
        # Stands on both: whether a machine computes rightly.
        "verify": (
            "settings wire record contracts device foreign replay check doctor kernels model engine"
        ),
        # Other engines beside ours, in processes of their own.
        "peers": "settings device kernels model engine trace",
        "audit": "settings record device model engine verify",
        "evals": "settings engine",
        "server": "settings wire conversation record watch",
        "ray": "settings",
        # `__init__.py`: what it imports eagerly; inside a function it may import anything.
        "package": "",
    }.items()
}
MAY_IMPORT["cli"] = frozenset({*MAY_IMPORT})
ROOMS = tuple(MAY_IMPORT)

#: The two halves of the house between which no import goes.
INSTRUMENT = frozenset({"foreign", "replay", "check", "doctor"})
ENGINE = frozenset({"kernels", "hub", "model", "engine", "worker", "server", "ray"})

#: Foreign package to the files or folders (ending in /) that may import it.
FENCES: dict[str, tuple[str, ...]] = {
    "numba": ("device/cpu/", "device/amd/"),
    "llvmlite": ("device/cpu/", "device/amd/"),
    "tinygrad": ("device/amd/decode.py",),
    "triton": ("device/triton_lang.py", "foreign/planted_gpu.py"),
    "torch": (
        "peers/programs/",
        "device/arrays.py", "device/group.py", "device/limits.py",
        "device/gpu/", "device/interpret/", "device/sim/",
        "replay/", "check/", "verify/own/",
        "foreign/planted_gpu.py", "foreign/streams/install.py",
    ),
    "ray": ("ray/",),
    "aiohttp": ("ray/",),
    "opentelemetry": ("server/operating/traces.py",),
    "starlette": ("server/", "ray/"),
    "uvicorn": ("server/",),
    "prometheus_client": ("server/",),
    "cyclopts": ("cli/",),
    "lm_eval": ("evals/",),
    "llguidance": ("engine/grammar.py", "engine/grammar_worker.py"),
    "rich": ("cli/",),
    "transformers": ("peers/programs/",),
    "llama_cpp": ("peers/programs/",),
    "gguf": ("peers/programs/",),
    "pickle": (),
}  # fmt: skip

#: File to foreign packages it must not import, although its floor may.
FILE_MUST_NOT_IMPORT = {
    "model/layers/decoder.py": frozenset({"numpy", "torch"}),
    "model/layers/heads.py": frozenset({"numpy", "torch"}),
}

#: Holds a file for each verb, none of which imports another.
VERBS = "cli/verbs/"

LAUNCH_ROOMS = frozenset({"device", "kernels", "model", "engine"})
LAUNCH_DOOR = frozenset({"device/launch.py", "device/cpu/lang.py"})

#: Where an array is data on its way through a step. Elsewhere `.tolist()` handles facts of a file.
COPY_WATCHED = (
    "kernels/", "model/layers/decoder.py", "model/layers/heads.py",
    "engine/runner.py", "engine/batch.py",
)  # fmt: skip
#: `file:function` to the reason why its calls are no copies from a device.
COPY_ALLOWED = dict.fromkeys(
    tuple(
        f"engine/batch.py:{name}" for name in ("_last_positions", "_check_range", "_first_repeated")
    ),
    "reads the batch, which the host has made",
)
COPY_CALLS = frozenset({"cpu", "item", "tolist", "numpy"})


def findings(root: Path) -> list[str]:
    """Every broken rule below `root`, the folder of the package, as `file:line what`."""
    found: list[str] = []
    for path in sorted(root.rglob("*.py")):
        tree = tree_of(path.read_text())
        name = path.relative_to(root).as_posix()
        for line, problem in sorted({*_imports(root, name, tree), *_doors(name, tree)}):
            found.append(f"{name}:{line} {problem}")
    return found


def room_of(name: str) -> str:
    """The room that a file (path below the package) or a module's first name belongs to."""
    first = name.split("/")[0].removesuffix(".py")
    if first == "__main__":
        return "cli"
    return "package" if first in ("__init__", "") else first


#: What `imported_modules` finds something in.
IMPORTING = (ast.Import, ast.ImportFrom, ast.Call)


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
    room = room_of(name)
    if room not in MAY_IMPORT:
        yield 1, f"lies in no room of the house; known are {', '.join(ROOMS)}"
        return
    allowed = MAY_IMPORT[room] | {room}
    is_eager = name == "__init__.py"
    nodes: Iterator[Any] = _eager_nodes(tree) if is_eager else nodes_of(tree, *IMPORTING)
    for node in nodes:
        for module in imported_modules(root, name, node):
            line: int = node.lineno
            if module.split(".")[0] == PACKAGE:
                target = room_of("/".join(module.split(".")[1:]))
                if target not in allowed:
                    yield line, f"({room}) may not import {module} ({target})"
                elif _joins_verbs(name, module):
                    yield line, f"is a verb and may not import {module}, which is another"
            elif not _fence_open(name, module.split(".")[0]):
                yield line, f"({room}) may not import {module}"


def _joins_verbs(name: str, module: str) -> bool:
    """Whether a verb's file imports the file of another; what verbs share has files of its own."""
    other = f"{'/'.join(module.split('.')[1:])}.py"
    return name.startswith(VERBS) and other.startswith(VERBS) and name != other


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
    launches = room_of(name) in LAUNCH_ROOMS and name not in LAUNCH_DOOR
    kernels = _kernel_names(tree) if launches else frozenset()
    tables = _dictionary_names(tree) if launches else frozenset()
    copies = name.startswith(COPY_WATCHED)
    free = {
        id(inner)
        for node in nodes_of(tree, ast.FunctionDef)
        if f"{name}:{node.name}" in COPY_ALLOWED
        for inner in ast.walk(node)
    }
    # Inside a GPU kernel a call of another one is device code, which Triton inlines.
    on_device = {
        id(inner)
        for node in nodes_of(tree, ast.FunctionDef)
        if name.endswith("_gpu.py") and node.name in kernels
        for inner in ast.walk(node)
    }
    for node in nodes_of(tree, ast.Call):
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
    for node in nodes_of(tree, ast.FunctionDef, ast.ImportFrom):
        if isinstance(node, ast.FunctionDef):
            marks = [m.func if isinstance(m, ast.Call) else m for m in node.decorator_list]
            words = {word for mark in marks for word in ast.unparse(mark).split(".")}
            if words & {"cpu_kernel", "allocating_kernel", "gpu_kernel", "jit"}:
                names.add(node.name)
        elif (node.module or "").endswith("_cpu"):
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
