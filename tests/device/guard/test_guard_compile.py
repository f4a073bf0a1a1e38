"""Guarded kernels compiled, with no GPU: they build for three targets and loads stay wide."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-call"
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from specimens import guard_kernels as K

from hypocenter.device.guard.guard import SLOTS, guard
from hypocenter.device.limits import named_gpu
from hypocenter.device.offline.compile import compile_source, compile_specimen, triton_source
from hypocenter.device.offline.compiled import CompiledKernel
from hypocenter.device.offline.specimen import Specimen
from hypocenter.device.triton_lang import triton

ARCHES = ("sm_90", "gfx942", "gfx1100")

# name: (types of the run-time parameters, constants)
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "scale_kernel": ("*fp16 *fp16 i32 fp32", {"BLOCK": 256}),
    "unmasked_kernel": ("*fp32 *fp32", {"BLOCK": 256}),
    "reassigned_kernel": ("*fp32 *fp32 i32", {"BLOCK": 256}),
    "either_kernel": ("*fp32 *fp32 *fp32 i32", {"BLOCK": 256}),
    "calls_kernel": ("*fp32 *fp32 *fp32 i32", {"BLOCK": 256}),
    "two_rooted_call_kernel": ("*fp32 *fp32 *fp32 i32", {"FIRST": True, "BLOCK": 256}),
    "atomics_kernel": ("*i32 *i32 i32", {"BLOCK": 256}),
    "lock_kernel": ("*i32 *i32 i32", {}),
    "descriptor_kernel": ("*fp32 *fp32 i32 i32", {"ROWS": 16, "WIDTH": 32}),
    "literal_descriptor_kernel": ("*fp32 *fp32 i32", {"WIDTH": 4}),
    "optional_kernel": ("*fp32 *fp32 *fp32 i32", {"HAS_BIAS": True, "BLOCK": 256}),
    "cast_kernel": ("*u8 *fp32 i32", {"BLOCK": 4}),
    "wide_cast_kernel": ("*u8 *i64 i32", {}),
    "rows_kernel": ("*fp32 *fp32 i32 i32", {"BLOCK": 256}),
    "rows_by_call_kernel": ("*fp32 *fp32 i32 i32", {"BLOCK": 256}),
    "names_kernel": ("*fp32 *fp32 i32", {"BLOCK": 64}),
    "chained_kernel": ("*fp32 *fp32 i32", {}),
    "tuple_kernel": ("*fp32 *fp32 i32", {"BLOCK": 64}),
    "one_line_kernel": ("*fp32 *fp32", {}),
    "wide_kernel": ("*fp16 *fp16 i32", {"BLOCK": 1024}),
}
#: Built for every target here; the others for sm_90 alone.
EVERYWHERE = ("calls_kernel", "atomics_kernel", "lock_kernel", "descriptor_kernel", "cast_kernel")


def specimen(kernel: Any, types: str, constants: dict[str, Any]) -> Specimen:
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types.split(), strict=True))
    divisible = tuple(name for name, kind in signature.items() if kind != "fp32")
    return Specimen(kernel, signature, constants, divisible)


def guarded_specimen(plain: Specimen, **options: Any) -> Specimen:
    pointers = [name for name, kind in plain.signature.items() if kind.startswith("*")]
    guarded = guard(plain.kernel, pointers, **options)
    signature = {**plain.signature, **guarded.extra_types}
    return Specimen(guarded.fn, signature, plain.constants, plain.divisible)


def form(name: str, **options: Any) -> Specimen:
    return guarded_specimen(specimen(getattr(K, name), *FORMS[name]), **options)


def ttir(plain_or_guarded: Specimen) -> str:
    limits = named_gpu("sm_90")
    source = triton_source(plain_or_guarded, limits)
    return str(compile_source(source, limits, {}).asm["ttir"])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.tier(
    "targets", fast=lambda case: case.name in ("scale_kernel", "descriptor_kernel", "lock_kernel")
)
def test_every_form_compiles(name: str) -> None:
    for arch in ARCHES if name in EVERYWHERE else ARCHES[:1]:
        built = compile_specimen(form(name), arch)
        assert built.ok, built.problems


@pytest.mark.parametrize("name", ["rows_kernel", "rows_by_call_kernel", "two_rooted_call_kernel"])
@pytest.mark.tier("targets", fast=lambda case: case.name == "rows_kernel")
def test_a_form_that_knows_rows_compiles(name: str) -> None:
    pointers = [one for one in getattr(K, name).arg_names if one.endswith("_ptr")]
    built = compile_specimen(form(name, with_rows=pointers[:2]), "sm_90")
    assert built.ok, built.problems
    built = compile_specimen(form(name, with_rows=pointers[:1]), "gfx942")
    assert built.ok, built.problems


def test_kernels_with_closures_and_lost_defaults_compile() -> None:
    for kernel in (K.make_closure_kernel(), K.make_default_kernel(65)):
        built = compile_specimen(
            guarded_specimen(specimen(kernel, "*fp32 *fp32 i32", {"BLOCK": 64})), "sm_90"
        )
        assert built.ok, built.problems


def test_a_pointer_may_be_a_constant_none() -> None:
    plain = specimen(
        K.optional_kernel,
        "*fp32 *fp32 i32",
        {"bias_ptr": None, "HAS_BIAS": False, "BLOCK": 64},
    )
    guarded = guard(plain.kernel, ["x_ptr", "bias_ptr", "y_ptr"])
    signature = {**plain.signature, **guarded.extra_types}
    built = compile_specimen(Specimen(guarded.fn, signature, plain.constants), "gfx942")
    assert built.ok, built.problems


def wide(built: CompiledKernel) -> tuple[int, int]:
    return built.loads.get(128, 0), built.stores.get(128, 0)


@pytest.mark.parametrize(
    ("types", "block"),
    [("*fp16 *fp16 i32", 2048), ("*fp32 *fp32 i32", 2048), ("*u8 *u8 i32", 4096)],
)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.tier("targets", fast=lambda case: case.block == 4096)
def test_wide_accesses_stay_wide(arch: str, types: str, block: int) -> None:
    plain = specimen(K.wide_kernel, types, {"BLOCK": block})
    before = compile_specimen(plain, arch)
    after = compile_specimen(guarded_specimen(plain), arch)
    assert before.loads.keys() == {128}
    assert wide(after) == wide(before)
    assert after.loads.keys() == {128}
    assert after.shared_bytes == before.shared_bytes == 0
    assert after.spills == before.spills == 0


def asm(plain_or_guarded: Specimen) -> str:
    limits = named_gpu("sm_90")
    source = triton_source(plain_or_guarded, limits)
    return str(compile_source(source, limits, plain_or_guarded.options).asm["ptx"])


def test_a_product_is_checked_once_and_by_the_threads_that_load_it() -> None:
    """In a pipelined loop a check in another layout than the load's would be made twice."""
    plain = specimen(
        K.product_kernel,
        "*fp16 *fp16 *fp32 i32 i32 i32",
        {"ROWS": 128, "COLUMNS": 128, "INNER": 32},
    )
    plain = replace(plain, options={"num_warps": 8})
    before, after = asm(plain), asm(replace(guarded_specimen(plain), options=plain.options))
    for word in ("cp.async.cg", "wgmma.mma_async", "bar.sync", "st.shared", "ld.shared"):
        assert after.count(word) == before.count(word), word
    # Each thread owns 2 groups of either operand and 16 of the result, and the latter are as many
    # stores of the kernel's own.
    assert after.count("st.global.b64") == 2 + 2 + 16
    assert after.count("\n\t") < 5 * before.count("\n\t")


def test_without_groups_they_would_not() -> None:
    built = compile_specimen(form("wide_kernel", group_bytes=0), "sm_90")
    assert wide(built)[0] == 0


@pytest.mark.parametrize("name", ["wide_kernel", "cast_kernel", "calls_kernel"])
def test_the_promise_of_equal_lanes_is_kept_by_the_values(name: str) -> None:
    """Each hinted value must be one value of its group, spread over the lanes, and nothing else.

    Triton computes one lane of a hinted group and uses it for all: a hint on a predicate that may
    differ between them (the bounds of each lane, the caller's mask) lets a bad lane through.
    """
    made_by = {}
    for line in ttir(form(name)).splitlines():
        if found := re.match(r"\s*(%[\w#]+)(?::\d+)? = \"?([\w.]+)\"?(.*)", line):
            made_by[found[1]] = (found[2], found[3].split(" loc(")[0])
    hinted = [name for name, (_, rest) in made_by.items() if "tt.constancy" in rest]
    hinted = [name for name in hinted if not made_by[name][0].startswith("tt.load")]
    assert hinted, "no hint is left: every load would be scalar"
    for value in hinted:
        lanes = int(re.findall(r"(\d+)\]?> : tensor<\d+xi32>}", made_by[value][1])[0])
        assert _spread(made_by, value) == lanes, made_by[value]


def _spread(made_by: dict[str, tuple[str, str]], value: str) -> int:
    """How many neighbours on the last axis are one value, by how `value` was made of it."""
    operation, rest = made_by[value]
    operands = [name for name in re.findall(r"%[\w#]+", rest.split(" : ")[0]) if name in made_by]
    if operation == "tt.join":
        assert operands[0] == operands[1], rest
        return 2 * _spread(made_by, operands[0])
    if operation == "tt.broadcast":
        shapes = re.findall(r"tensor<([\dx]+)xi32>", rest)
        before, after = ([int(size) for size in shape.split("x")] for shape in shapes)
        assert before[-1] == 1
        assert before[:-1] == after[:-1]
        return after[-1]
    if operation in ("tt.reshape", "arith.cmpi"):
        (source,) = [name for name in operands if made_by[name][0] != "arith.constant"]
        return _spread(made_by, source)
    return 1


def test_each_call_of_an_inner_function_has_its_own_slot() -> None:
    """Triton knows functions by name and types: clones of one name would share one body."""
    slots = guard(K.calls_kernel, ["x_ptr", "y_ptr", "z_ptr"]).sites
    assert [site.slot for site in slots] == [1, 2, 3]
    text = ttir(form("calls_kernel"))
    constants = dict(re.findall(r"(%\w+) = arith\.constant (\d+) : i32", text))
    added = re.findall(r"tt\.addptr %guard__slots, (%\w+) ", text)
    assert sorted(constants[name] for name in added) == ["1", "2", "3"]


def test_extents_and_windows_do_not_compile_again() -> None:
    guarded = guard(K.scale_kernel, ["x_ptr", "y_ptr"])
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    backend = triton.compiler.make_backend(target)
    bind = triton.runtime.jit.create_function_from_signature(
        guarded.fn.signature, guarded.fn.params, backend
    )
    words, keys = torch.zeros(32, dtype=torch.int64), set()
    for i, extent in enumerate((1, 16, 4096, 2**31, 2**33 + 1)):
        x = torch.zeros(8)
        extents = {"guard__x_ptr_bytes": extent, "guard__y_ptr_bytes": 3 * extent}
        given = {"x_ptr": x, "y_ptr": x, "count": 8, "factor": 0.5, "BLOCK": 64}
        _, specialization, _ = bind(**given, **extents, **{SLOTS: words[i:]})
        keys.add(str(specialization))
    assert len(keys) == 1, keys
