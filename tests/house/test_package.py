"""What is found by path is found wherever it lies, and no other file derives facts from paths."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from layering import IMPORTING, imported_modules
from parsed import nodes_of, tree_of
from repository import ROOT

from hypocenter.base import package
from hypocenter.contracts import registry
from hypocenter.device.cpu import sources
from hypocenter.kernels.attention import unfused
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import ArgumentRecord, LaunchRecord
from hypocenter.record.fault_record import FaultRecord

#: Files that may read their own `__file__`, each with the reason.
MAY_READ_FILE = {
    "base/package.py": "it is the one place for that",
    "foreign/startup/sitecustomize.py": "it runs in programs where this package is not importable",
    "foreign/startup/hypocenter_waiting.py": "it runs in them as well",
    "device/marks.py": "it names itself as the site of an allocation",
}


def own_paths(root: Path) -> Iterator[str]:
    """`file:line` of everything that asks where its own file lies."""
    for path in sorted(root.rglob("*.py")):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        for node in ast.walk(tree_of(text)) if "__file__" in text else ():
            if isinstance(node, ast.Name) and node.id == "__file__" and name not in MAY_READ_FILE:
                yield f"{name}:{node.lineno}"


def test_only_one_file_derives_facts_from_where_files_lie() -> None:
    assert list(own_paths(package.FOLDER)) == []


def test_a_planted_path_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nHERE = __file__.rsplit('/')\n")
    assert list(own_paths(tmp_path)) == ["a.py:2"]


def own_temporary(root: Path) -> Iterator[str]:
    """`file:line` of what is made among temporary files by other means than `own_folder`."""
    for path in sorted(root.rglob("*.py")):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        if name == "base/own_folder.py" or "tempfile" not in text:
            continue
        for call in nodes_of(tree_of(text), ast.Call):
            made = ast.unparse(call.func)
            # A file without a name goes by itself, and what is beside others is not temporary.
            is_beside = any(word.arg == "dir" for word in call.keywords)
            if made.startswith("tempfile.") and made != "tempfile.TemporaryFile" and not is_beside:
                yield f"{name}:{call.lineno}"


def test_nothing_temporary_stays_when_its_process_is_killed() -> None:
    assert list(own_temporary(package.FOLDER)) == []


def test_a_planted_temporary_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import tempfile\nx = tempfile.mkdtemp(prefix='x-')\n")
    assert list(own_temporary(tmp_path)) == ["a.py:2"]


def _module_texts() -> Iterator[tuple[str, str]]:
    """(where, text) of each string in the sources that names a module or something in one."""
    files = [
        path
        for folder in ("src", "benchmarks", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    for path in files:
        if not re.search(r"""["']hypocenter\.""", text := path.read_text()):
            continue
        tree = tree_of(text)
        loggers = {
            id(arg)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in ("getLogger", "startswith")
            for arg in node.args
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.startswith("hypocenter.")
                and id(node) not in loggers
                and all(map(str.isidentifier, node.value.replace(":", ".").split(".")))
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def _is_there(text: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = text.replace(":", ".").split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(name) is not None:
                found: list[Any] = [importlib.import_module(name)] if length < len(parts) else []
                for part in parts[length:]:
                    found.append(getattr(found[-1], part, None))
                return None not in found
    return False


def test_a_module_that_is_named_in_a_string_exists() -> None:
    """Such a string fails in a helper process, or in silence, once the module has moved."""
    texts = dict(_module_texts())
    assert len(texts) > 20
    assert {where: text for where, text in texts.items() if not _is_there(text)} == {}
    assert not _is_there("hypocenter.device.no_such_file")
    assert not _is_there("hypocenter.settings.config:no_such_name")


def test_kernels_are_found_in_every_folder_of_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kernels/a_gpu.py", "kernels/room/b_gpu.py", "kernels/b_cpu.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    monkeypatch.setattr(package, "FOLDER", tmp_path)
    assert [package.module_name(path) for path in package.gpu_kernel_files()] == [
        "hypocenter.kernels.a_gpu",
        "hypocenter.kernels.room.b_gpu",
    ]
    assert package.kernel_module("b_cpu") == "hypocenter.kernels.b_cpu"
    with pytest.raises(KeyError, match=r"no file c_gpu\.py"):
        package.kernel_module("c_gpu")
    found = package.recorded_kernel_module
    assert found("/opt/elsewhere/hypocenter/kernels/room/b_gpu.py") == (
        "hypocenter.kernels.room.b_gpu"
    )
    for other in ("kernels/gone_gpu.py", "device/a.py", "kernels/../kernels/a_gpu.py", ""):
        assert found(f"/opt/elsewhere/hypocenter/{other}") is None
    assert found("/opt/elsewhere/kernels/a_gpu.py") is None


def test_no_two_files_of_kernels_have_one_stem() -> None:
    stems = [path.stem for path in package.module_files("kernels") if path.stem != "__init__"]
    assert len(stems) == len(set(stems)) > 40


def test_every_contract_of_the_ops_is_in_the_registry() -> None:
    """Of files that need no Triton; a launch whose contract is not there cannot be rechecked."""
    declared = [
        path.stem
        for path in package.module_files("kernels")
        if not path.stem.endswith(("_cpu", "_gpu")) and re.search(r"\bContract\(", path.read_text())
    ]
    found = registry.all_contracts()
    stems = {contract.place.partition(":")[0].rpartition(".")[2] for contract in found}
    assert stems == {*declared} - {"contract"}
    assert len(found) > 60


def test_each_contract_is_found_again_at_the_place_that_it_names() -> None:
    found = registry.all_contracts()
    assert all(registry.contract_at(contract.place) is contract for contract in found)
    assert "hypocenter.kernels.linear.linear:SCALED[1]" in {contract.place for contract in found}
    for other in ("", "os:name", "hypocenter.kernels.linear.linear:GONE", "json:decoder"):
        assert registry.contract_at(other) is None


def test_the_contract_of_a_launch_is_the_one_that_it_names() -> None:
    """Not the first one that fits: those of keys and of values have the same names."""
    names = ("cache", "block_tables", "lengths", "out")
    facts = tuple(ArgumentRecord(name, None, None) for name in names)
    bundle = Bundle(kind="crash", fault=FaultRecord(kind="none", message=""))
    for contract in (unfused.EXPAND_KEYS, unfused.EXPAND_VALUES):
        launch = LaunchRecord(
            kernel="expand",
            function="expand_kernel",
            device="cuda:0",
            facts=facts,
            declared=contract.place,
        )
        assert registry.recorded_contract(bundle, launch) is contract
    # One of a version that says nothing, and one that names another: by what fits.
    for declared in ("", "hypocenter.kernels.rowwise.norm:CONTRACT", "os:path"):
        launch = msgspec.structs.replace(launch, declared=declared)
        assert registry.recorded_contract(bundle, launch) is unfused.EXPAND_KEYS


def test_the_nearest_caller_outside_a_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert package.caller_outside("device").startswith(f"{__file__}:")
    monkeypatch.setattr(package, "FOLDER", Path(__file__).parent)
    package.is_below.cache_clear()
    try:
        assert not package.caller_outside("test_package.py").startswith(__file__)
        assert package.caller_outside("test_package").startswith(__file__)
    finally:
        monkeypatch.undo()
        package.is_below.cache_clear()


# -- what may be in a kernel's machine code --------------------------------------------------------


def _stems(stem: str) -> set[str]:
    """Files of the import closure of a file of kernels, as paths below the package."""
    (file,) = (path for path in package.module_files(".") if path.stem == stem)
    return {path.relative_to(package.FOLDER).as_posix() for path in sources.import_closure(file)}


def test_machine_code_hangs_on_the_files_that_its_kernel_imports_and_on_no_others() -> None:
    closure = _stems("attention_cpu")
    for stem in ("attention_tile_cpu", "vector", "lang", "items"):
        assert any(name.endswith(f"/{stem}.py") for name in closure), stem
    for stem in ("recorder", "launch", "errors", "config", "norm_cpu", "attention"):
        assert not any(Path(name).stem == stem for name in closure), stem


def test_the_closure_is_what_the_imports_say() -> None:
    """Imports are found by their text; Python's own parser finds no other."""
    for path in package.module_files("."):
        name = path.relative_to(package.FOLDER).as_posix()
        tree = tree_of(path.read_text())
        named = {
            module
            for node in nodes_of(tree, *IMPORTING)
            for module in imported_modules(package.FOLDER, name, node)
            if module.startswith("hypocenter.") and module not in sources.NOT_IN_KERNELS
        }
        wanted = {package.FOLDER.joinpath(*m.split(".")[1:]).with_suffix(".py") for m in named}
        found = sources.imported_files(path)
        assert {file for file in wanted if file.is_file()} - found == set(), name


def test_what_is_left_out_of_the_closure_holds_nothing_that_kernels_take() -> None:
    """Files with compiled functions may take only classes and functions of the host from there."""
    taken = {}
    for path in package.module_files("."):
        text = path.read_text()
        if path.stem.endswith("_cpu") or "import cpu_kernel" in text or "import inline" in text:
            for node in nodes_of(tree_of(text), ast.ImportFrom):
                if node.module in sources.NOT_IN_KERNELS:
                    taken[path.stem] = [alias.name for alias in node.names]
    assert taken == {}
