"""`hypo env` tells the truth about versions, devices, caches and variables, and warns where due."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from outside.terminal import hypo, hypo_in_process
from repository import ROOT

from hypocenter.cli.verbs import env
from hypocenter.device.cpu.instructions import NEEDED
from hypocenter.settings.environment import INSTRUCTIONS, KNOWN


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The /dev and /proc of a machine with an AMD GPU."""
    root = tmp_path_factory.mktemp("machine")
    (root / "dev").mkdir()
    (root / "dev/kfd").touch()
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Toy CPU: two cores\n")
    (root / "proc/meminfo").write_text("MemTotal:  2048 kB\nMemAvailable:  1024 kB\n")
    return root


_ask_torch_once = cache(env._ask_torch)


@pytest.fixture(autouse=True)
def _torch_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process of its own, which takes seconds; what it says stays the same."""
    monkeypatch.setattr(env, "_ask_torch", _ask_torch_once)


def test_json_holds_every_dependency_with_its_version() -> None:
    done = hypo("env", "--json", environ={"HIP_LAUNCH_BLOCKING": "1", "NUMBA_NUM_THREADS": "1"})
    report = json.loads(done.stdout)
    assert report["versions"]["numpy"] == metadata.version("numpy")
    assert report["torch"]["vendor"] in ("cpu", "cuda", "hip")
    assert report["cpu"]["instruction_set"] in (
        "avx512-bf16", "avx512-vnni", "avx512", "avx-vnni", "avx2", "neon", "plain",
    )  # fmt: skip
    assert report["cpu"]["kernel_threads"] == 1
    assert report["environment"]["HIP_LAUNCH_BLOCKING"] == "1"
    assert report["environment"]["NUMBA_NUM_THREADS"] == "1"
    assert report["environment"]["HYPO_DEBUG"] is None


def test_the_pool_of_threads_is_named() -> None:
    shown = hypo_in_process("env").stdout
    cpu = json.loads(hypo_in_process("env", "--json").stdout)["cpu"]
    assert cpu["thread_pool"] in ("tbb", "omp")
    assert re.search(
        rf"threads +{cpu['kernel_threads']} of {cpu['thread_pool']} for kernels", shown
    )


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="paths of x86 alone")
@pytest.mark.parametrize("path", INSTRUCTIONS)
@pytest.mark.tier("paths", fast=lambda case: case.path == "plain")
def test_kernels_use_no_more_instructions_than_asked_for(path: str) -> None:
    done = hypo("env", "--json", environ={"HYPO_INSTRUCTIONS": path})
    if missing := [name for name in NEEDED[path] if name not in _features_of_this_machine()]:
        assert f"HYPO_INSTRUCTIONS is {path}, but this CPU has no {missing[0]}" in done.stderr
        assert done.returncode == 2
        return
    found = json.loads(done.stdout)["cpu"]
    assert found["instruction_set"] == path
    faster = {name for one in INSTRUCTIONS[: INSTRUCTIONS.index(path)] for name in NEEDED[one]}
    assert not set(found["features"]) & (faster - set(NEEDED[path]))


@cache
def _features_of_this_machine() -> frozenset[str]:
    asked = hypo if os.environ.get("HYPO_INSTRUCTIONS") else hypo_in_process
    whole = asked("env", "--json", environ={"HYPO_INSTRUCTIONS": ""}).stdout
    return frozenset(json.loads(whole)["cpu"]["features"])


def test_the_dependencies_shown_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", text)[0] for text in project["dependencies"]}
    assert names <= set(env.DEPENDENCIES)
    assert project["optional-dependencies"]["gpu"] == [
        next(text for text in project["optional-dependencies"]["gpu"] if text.startswith("torch"))
    ]


def test_text_names_versions_cache_and_variables() -> None:
    shown = hypo_in_process("env", environ={"AMD_SERIALIZE_KERNEL": "3"}).stdout
    assert metadata.version("numba") in shown
    assert re.search(r"AMD_SERIALIZE_KERNEL +3", shown)
    assert f"records of runs\n  {os.environ['HYPO_RUN_DIR']}\n" in shown
    assert "off (HYPO_RECORD=0)" in hypo_in_process("env", environ={"HYPO_RECORD": "0"}).stdout
    for name in (*KNOWN, "HIP_VISIBLE_DEVICES", "HSA_ENABLE_SDMA", "HIP_LAUNCH_BLOCKING",
                 "CUDA_LAUNCH_BLOCKING", "HIP_DUMP_API_LOG"):  # fmt: skip
        assert name in shown, name


@pytest.mark.parametrize(
    ("vendor", "gpus", "is_wrong"),
    [
        ("cuda", ["amd"], True),
        ("cpu", ["amd"], True),
        ("hip", ["amd"], False),
        ("hip", ["nvidia"], True),
        ("cuda", ["nvidia"], False),
        ("cuda", ["amd", "nvidia"], False),
        ("cpu", [], False),
        ("cuda", [], False),
    ],
)
def test_a_torch_of_the_wrong_vendor_is_named(vendor: str, gpus: list[str], is_wrong: bool) -> None:
    problem = env.torch_problem(vendor, gpus)
    assert bool(problem) == is_wrong
    if is_wrong:
        assert gpus[0] in problem


def test_the_facts_of_a_machine_with_an_amd_gpu(machine: Path) -> None:
    report = env.collect({}, machine)
    assert report["devices"]["gpu_vendors"] == ["amd"]
    assert report["cpu"]["model"] == "Toy CPU: two cores"
    assert report["memory"] == {"total_bytes": 2 << 20, "available_bytes": 1 << 20}
    if report["torch"]["vendor"] != "hip":
        assert any("amd" in warning for warning in report["warnings"])


def test_a_machine_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    report = env.collect({}, tmp_path)
    assert report["memory"] == {"total_bytes": None, "available_bytes": None}
    assert report["devices"]["gpu_vendors"] == []


@pytest.mark.tier("whole")
def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    done = hypo("env", "--json", environ={"HYPO_CACHE_DIR": str(blocked / "cache")})
    report = json.loads(done.stdout)
    assert report["cache"]["folder"] == str(blocked / "cache")
    assert any("compiled anew" in warning for warning in report["warnings"])


@pytest.mark.parametrize(
    ("version", "is_told"),
    [("3.6.0", False), ("3.9.0+git12", False), ("3.8.0", True), ("3.10.0", True), ("4.0", True)],
)
def test_a_triton_that_nobody_tested_is_told(
    monkeypatch: pytest.MonkeyPatch, version: str, is_told: bool
) -> None:
    found = env._version
    monkeypatch.setattr(env, "_version", lambda name: version if name == "triton" else found(name))
    told = f"triton is {version}, but kernels were tested with 3.6 and 3.9 only"
    assert (told in env.collect({})["warnings"]) == is_told


def test_such_a_triton_is_told_when_kernels_are_asked_for() -> None:
    pytest.importorskip("triton")
    script = "import triton; triton.__version__ = '3.8.1'\nimport hypocenter.device.triton_lang"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr == "triton is 3.8.1, but kernels were tested with 3.6 and 3.9 only\n"
