"""Linked code is taken only while its source, what linked it and its owner are the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import PACKAGE_DIR

from hypocenter.device.cpu import kept_files, linked_code, target
from hypocenter.device.cpu.lang import binding
from hypocenter.device.cpu.object_code import Unlinkable, link

pytestmark = pytest.mark.skipif(not linked_code.can_load(), reason="only x86-64 code is linked")

PROGRAM = """
import sys
import numpy as np
from hypocenter.device.cpu.kernel_forms import named_kernel

x = np.ones((4, 64), np.float32)
scale = named_kernel("kernels.rowwise.activation_cpu.scale")
for is_shared in (False, True):
    form = scale.form(is_shared=is_shared)
    form.bound((x, np.array([4, 0], np.int32), 0, np.float32(3)))()
print(float(x[0, 0]), "numba" in sys.modules)
"""


FEATURES = """
import sys
from hypocenter.device.cpu.target import cpu_features

print(len(cpu_features()), "numba" in sys.modules)
"""


def _run(package: Path, folder: Path, program: str = PROGRAM) -> list[str]:
    command = [sys.executable, "-c", program]
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(package.parent),
        "HYPO_CACHE_DIR": str(folder),
    }
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.split()


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new))


def _copied(folder: Path) -> Path:
    package = folder / "src" / PACKAGE_DIR.name
    shutil.copytree(PACKAGE_DIR, package, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    return package


@pytest.mark.tier("whole")
def test_features_are_asked_for_anew_where_what_limits_them_has_another_text(
    tmp_path: Path,
) -> None:
    package, folder = _copied(tmp_path), tmp_path / "cache"
    limited = package / "device" / "cpu" / "instructions.py"
    assert _run(package, folder, FEATURES)[1] == "True"
    assert _run(package, folder, FEATURES)[1] == "False"
    limited.write_text(limited.read_text() + "# another\n")
    assert _run(package, folder, FEATURES)[1] == "True"


@pytest.mark.tier("whole")
def test_code_of_another_source_is_not_run(tmp_path: Path) -> None:
    """That of the kernel, of a file that it imports, and of what calls and links it."""
    package, folder = _copied(tmp_path), tmp_path / "cache"
    cpu = package / "device" / "cpu"
    assert _run(package, folder) == ["9.0", "True"]
    assert _run(package, folder) == ["9.0", "False"]
    kernel, scaled = package / "kernels" / "rowwise" / "activation_cpu.py", "splat(factor)"
    _edit(kernel, f"mul(load(x, at), {scaled})", f"mul(add({scaled}, {scaled}), load(x, at))")
    assert _run(package, folder) == ["36.0", "True"]
    for file in ("vector.py", "spreaders.py", "object_code.py", "slots.py", "linked_code.py"):
        assert _run(package, folder)[1] == "False"
        with open(cpu / file, "a") as text:
            text.write("# another\n")
        assert _run(package, folder)[1] == "True", file


def test_a_file_that_others_may_have_written_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was open to all is made private; what lies in it may still be another's."""
    monkeypatch.setattr(kept_files, "_folder", lambda: tmp_path)
    kept_files.write("x", b"code")
    (tmp_path / "x").chmod(0o666)
    assert kept_files.read("x") is None
    (tmp_path / "x").chmod(0o600)
    assert kept_files.read("x") == b"code"
    (tmp_path / "x").rename(tmp_path / "another's")
    (tmp_path / "x").symlink_to(tmp_path / "another's")
    assert kept_files.read("x") is None
    if os.getuid() == 0:
        os.chown(tmp_path / "another's", 65534, 65534)
        (tmp_path / "another's").rename(tmp_path / "x")
        assert kept_files.read("x") is None


TEXT = """
target triple = "{triple}"
declare i64 @nobody(i64)
define {linkage} i64 @asks(i64 %x) noinline {{
  %v = call i64 @nobody(i64 %x)
  ret i64 %v
}}
define i64 @kernel(i64 %x) {{
  %v = call i64 @asks(i64 %x)
  ret i64 %v
}}
"""


@pytest.mark.parametrize("linkage", ["", "internal", "private"])
def test_what_a_function_of_the_same_file_asks_for_counts(linkage: str) -> None:
    """Calls of a function that no other file sees name its section, and not the function."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    triple = binding.Target.from_default_triple()
    machine = triple.create_target_machine(jit=True, codemodel="large", opt=0)
    text = TEXT.format(triple=binding.get_default_triple(), linkage=linkage)
    data = bytes(machine.emit_object(binding.parse_assembly(text)))
    with pytest.raises(Unlinkable):
        link([data], {"kernel"}, ())


@pytest.mark.parametrize("elsewhere", ["numba", "llvmlite", "numpy"])
def test_without_the_version_of_each_compiler_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: str
) -> None:
    """One that lies in another folder may be exchanged unseen."""
    for name in {"numba", "llvmlite", "numpy"} - {elsewhere}:
        (tmp_path / f"{name}-1.2.dist-info").mkdir()
    monkeypatch.setattr(target, "numba_folder", lambda: tmp_path / "numba")
    assert target._versions() == ""
    (tmp_path / f"{elsewhere}-1.2.dist-info").mkdir()
    assert target._versions().split() == sorted(path.name for path in tmp_path.iterdir())
