"""Beside a good run: numbers that were wrong before they were none, names that two functions share,
weights that are exchanged, and weights that nobody compared."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from recorded.bundles import Run, decoder, inputs, tensors_of_decoder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.installed_text import changes, installed_texts, texts_of
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import (
    ArgumentDeclaration,
    Declaration,
    LaunchRecord,
    Place,
    SourceRecord,
    Statistics,
)
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.trace_log import MAX_TENSOR_BYTES

NO_REPLAY = ("replay", "hang")
NONFINITE = FaultRecord(kind="nonfinite", message="logits row 0: 512 of 512 values are NaN")
DIFFERS = FaultRecord(kind="differs", message="")


def figures(tensor: int, place: Place, digest: str, num_nan: int = 0) -> Statistics:
    return Statistics(
        place=place, tensor=tensor, digest=f"k:{digest}", low=0.0, high=1.0, mean=0.5, rms=0.5,
        num_nan=num_nan, num_inf=0, first_nonfinite=(0, 0) if num_nan else None,
    )  # fmt: skip


def two_norms(factor: float, digests: tuple[str, str], nan_at: int | None, **more: Any) -> Bundle:
    """Two launches: what they wrote, and after which of them it was NaN."""
    run = Run()
    tensors_of_decoder(run)
    first = run.launch("rms_norm", {"x": "x", "out": "q", "eps": factor})
    plan = run.plan(first, run.launch("rms_norm", {"x": "q", "out": "out", "eps": 1.0}))
    run.run(plan, inputs())
    written = ArgumentDeclaration(name="out", dtypes=("F32",), shape="num_rows", access="write")
    run.contracts["rms_norm"] = Declaration(kernel="rms_norm", arguments=(written,))
    seen = tuple(
        figures(run.tensors[name].id, Place(1, plan, at), digest, 4 * (at == nan_at))
        for at, (name, digest) in enumerate(zip(("q", "out"), digests, strict=True))
    )
    return run.bundle(more.get("fault", DIFFERS), statistics=seen)


def found_in(bad: Bundle, good: Bundle) -> Diagnosis:
    return diagnose(bad, good, without=NO_REPLAY)


def test_numbers_that_were_wrong_before_one_was_none_are_held_against_the_good_run() -> None:
    good = two_norms(1e-5, ("a", "b"), None)
    found = found_in(two_norms(2.0, ("x", "y"), 1, fault=NONFINITE), good)
    root = found.roots[0]
    assert (root.cause, root.argument) == (Cause.WRONG_ANSWER, "eps")
    assert found.is_proven


def test_where_the_first_wrong_number_is_none_the_other_checks_say_why() -> None:
    good = two_norms(1e-5, ("a", "b"), None)
    found = found_in(two_norms(2.0, ("x", "y"), 0, fault=NONFINITE), good)
    assert Cause.WRONG_ANSWER not in {root.cause for root in found.roots}
    crash = found_in(
        two_norms(2.0, ("x", "y"), 1, fault=FaultRecord(kind="crash", message="")), good
    )
    assert Cause.WRONG_ANSWER not in {root.cause for root in crash.roots}


def source(function: str, file: str, text: str, *callees: str) -> SourceRecord:
    return SourceRecord(
        id=f"{file}:{text}", function=function, file=file, first_line=1, text=text, callees=callees
    )


def test_a_function_is_held_against_that_of_its_own_module() -> None:
    sources = [
        source("_unit", "/a/delta_gpu.py", "def _unit(x):\n    return x"),
        source("_unit", "/a/tile_gpu.py", "def _unit(largest):\n    return largest"),
    ]
    launch = LaunchRecord(kernel="k", function="k", device="sim:h200", source=sources[0].id)
    table = {one.id: one for one in sources}
    assert not changes(launch, table, texts_of(sources))
    changed = [source("_unit", "/b/delta_gpu.py", "def _unit(x):\n    return -x"), sources[1]]
    [change] = changes(launch, table, texts_of(changed))
    assert (change.line, change.text, change.was) == (2, "return x", "return -x")
    # A function that moved is found by its name where only one has it.
    moved = [source("_unit", "/b/other_gpu.py", "def _unit(x):\n    return 2 * x")]
    assert [change.was for change in changes(launch, table, texts_of(moved))] == ["return 2 * x"]
    assert not changes(launch, table, texts_of([*moved, sources[1]]))


def test_the_installed_texts_tell_functions_of_one_name_apart() -> None:
    texts = installed_texts()
    named = [module for module, function in texts if function == "_unit" and module]
    assert len(named) > 1
    assert len(texts["", "_unit"]) == len(named)


def exchanged(names: tuple[str, str], digest: str) -> Bundle:
    """A product with two weights, of which what they hold was seen."""
    run = Run()
    tensors_of_decoder(run)
    for name in ("attn_k", "attn_v"):
        run.tensor(name, "F32", 4, 4, owner="model")
    facts = dict(zip(("weight", "weight_2"), names, strict=True))
    launch = run.launch("linear_float", {"x": "x", "out": "k", **facts}, {"x_ptr": "x"})
    plan = run.plan(launch)
    run.run(plan, inputs())
    written = ArgumentDeclaration(name="out", dtypes=("F32",), shape="num_rows", access="write")
    run.contracts["linear_float"] = Declaration(kernel="linear_float", arguments=(written,))
    seen = [figures(run.tensors[name].id, Place(1, plan, 0), name) for name in ("attn_k", "attn_v")]
    return run.bundle(
        DIFFERS, statistics=(*seen, figures(run.tensors["k"].id, Place(1, plan, 0), digest))
    )


def test_weights_that_are_exchanged_are_one_fact() -> None:
    bad, good = exchanged(("attn_v", "attn_k"), "x"), exchanged(("attn_k", "attn_v"), "a")
    root = found_in(bad, good).roots[0]
    assert (root.cause, root.argument) == (Cause.WRONG_ANSWER, "weight")
    assert "attn_v, in the good run name attn_k" in root.sentence


def with_large(num_bytes: int) -> Bundle:
    made = exchanged(("attn_k", "attn_v"), "a")
    large = next(tensor for tensor in made.tensors if tensor.name == "attn_v")
    tensors = tuple(
        msgspec.structs.replace(tensor, extent_bytes=num_bytes) if tensor is large else tensor
        for tensor in made.tensors
    )
    seen = tuple(one for one in made.statistics if one.tensor != large.id)
    return msgspec.structs.replace(made, tensors=tensors, statistics=seen)


def test_weights_that_nobody_compared_are_told_by_name_and_size() -> None:
    size = math.ceil(1.5 * MAX_TENSOR_BYTES)
    found = found_in(with_large(size), with_large(size))
    [gap] = [gap for gap in found.unseen if "attn_v" in gap.what]
    assert gap.what == "what these hold: attn_v (96 MiB)"
    assert "no weight of more than 64 MiB" in gap.reason
    whole = exchanged(("attn_k", "attn_v"), "a")
    assert not [gap for gap in found_in(whole, whole).unseen if "attn" in gap.what]
    # Nothing of it is said of runs that were not traced.
    plain = msgspec.structs.replace(with_large(size), statistics=())
    assert not [gap for gap in found_in(plain, plain).unseen if "attn" in gap.what]


def test_a_decoder_beside_itself_has_no_finding() -> None:
    run = Run()
    tensors_of_decoder(run)
    run.run(decoder(run), inputs())
    made = run.bundle(FaultRecord(kind="none", message=""))
    assert not found_in(made, made).roots
