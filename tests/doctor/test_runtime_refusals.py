"""The doctor on what a runtime, a compiler or a kernel refused: proven by the refusal alone."""

from __future__ import annotations

import msgspec
import pytest
from pretended import runtime_words as texts
from recorded.bundles import Run

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.report_parts import what_would_help
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import FOREIGN, Launched
from hypocenter.watch.fault_text import fault_in


def bundle_of(stderr: str) -> Bundle:
    """That of a command of which nothing is known but what it wrote."""
    fault = fault_in(stderr, 1, None)
    return Bundle(kind=fault.kind, fault=fault, command=("python", "train.py"), stderr=stderr)


def diagnosis(stderr: str) -> Diagnosis:
    return diagnose(bundle_of(stderr))


@pytest.mark.parametrize(
    ("stderr", "cause", "kernel", "parts"),
    [
        (
            texts.AUTOTUNER, Cause.NO_CONFIGURATION, "attention_fwd",
            ["No valid autotuner configs", "early_config_prune of attention_fwd"],
        ),
        (
            texts.RESOURCES, Cause.SHARED_MEMORY, "attention_fwd",
            ["needs 278528 bytes of shared memory", "has 232448", "num_stages"],
        ),
        (
            texts.RESOURCES.replace("shared memory", "threads"), Cause.THREAD_LIMIT,
            "attention_fwd", ["has 278528 threads", "takes 232448", "smaller num_warps"],
        ),
        (
            texts.RESOURCES.replace("shared memory", "tensor memory"), Cause.TENSOR_MEMORY,
            "attention_fwd", ["needs 278528 columns of tensor memory", "smaller tiles"],
        ),
        (
            texts.COMPILE, Cause.NOT_COMPILED, "cast_kernel",
            ["type fp8e4nv not supported", "'fp8e5'", "another line than `x = x.to("],
        ),
        (
            texts.ASSERTED, Cause.INDEX_RANGE, "indexSelectLargeIndex",
            [
                "which an embedding or index_select runs", "srcIndex < srcSelectDimSize",
                "block (63, 0, 0), thread (64, 0, 0) and 2 more", "CUDA_LAUNCH_BLOCKING=1",
            ],
        ),
        (
            texts.ASSERTIONS.replace("indexSelectLargeIndex", "my_kernel").replace(
                "srcIndex < srcSelectDimSize", "n > 0"
            ),
            Cause.DEVICE_ASSERT, "my_kernel", ["asserts n > 0", "values for which n > 0 holds"],
        ),
        (
            texts.NO_CODE, Cause.NO_CODE_OBJECT, None,
            ["RTX 5090 is sm_120", "code for sm_80, sm_86, sm_90", "code for sm_120"],
        ),
        (
            texts.CAPTURE, Cause.CAPTURE_REFUSED, "norm_kernel",
            ["while a graph was captured", "(900)", "Launch norm_kernel once", "first launch"],
        ),
        (
            texts.CAPTURE.replace(texts.TRITON, "")
            .replace("norm_kernel[(n,)](x, y, n)", "n = x.item()")
            .replace("Triton Error [CUDA]", "CUDA error"),
            Cause.CAPTURE_REFUSED, "`n = x.item()`", ["Take `n = x.item()` out of the capture"],
        ),
    ],
    ids=[
        "pruned", "shared", "threads", "tensor", "type", "assert", "other", "code",
        "triton", "item",
    ],
)  # fmt: skip
def test_the_refusal_is_the_proof(
    stderr: str, cause: Cause, kernel: str | None, parts: list[str]
) -> None:
    found = diagnosis(stderr)
    (root,) = found.roots
    assert root.cause is cause
    if kernel is not None:
        assert root.kernel == kernel
    told = " ".join((root.sentence, root.fix, root.proof.red, root.proof.corrected))
    for part in parts:
        assert part in told
    assert not found.is_unexplained
    if stderr.startswith("Traceback") or "train.py" in stderr:
        assert root.launched_at == "/home/ann/train.py:61"


@pytest.mark.parametrize(
    ("packages", "told"),
    [
        ({}, "which Triton and NumPy ran was not recorded"),
        ({"triton": "3.6.0", "numpy": "2.4.6"}, "versions that ran: triton 3.6.0, numpy 2.4.6"),
        ({"triton": "3.5.1+git"}, "versions that ran: triton 3.5.1+git"),
    ],
)
def test_what_numpy_refuses_of_the_interpreter_is_told_and_nothing_is_called_a_fix(
    packages: dict[str, str], told: str
) -> None:
    """A loop over a vector, which is the program's own mistake, ends with the same words."""
    bundle = msgspec.structs.replace(bundle_of(texts.INTERPRETER), packages=packages)
    found = diagnose(bundle)
    assert found.roots == ()
    [seen] = [row for row in found.hypotheses if row.cause is Cause.OLD_INTERPRETER]
    assert (seen.verdict, seen.kernel) == (Verdict.INCONCLUSIVE, "sum_bags")
    assert seen.at == "/home/ann/train.py:61"
    assert "`int(self.handle.data)`" in seen.evidence[0]
    assert "only 0-dimensional arrays" in seen.evidence[0]
    assert seen.evidence[1] == told
    assert seen.evidence[-1].startswith("not tried: NumPy below 2.4 or a newer Triton")
    assert "not tried: NumPy below 2.4" in " ".join(what_would_help(found))


@pytest.mark.parametrize(
    "packages",
    [{"triton": "3.9.0", "numpy": "2.4.6"}, {"triton": "3.6.0", "numpy": "2.3.5"}],
    ids=["a newer Triton", "an older NumPy"],
)
def test_versions_that_go_together_are_not_named(packages: dict[str, str]) -> None:
    bundle = msgspec.structs.replace(bundle_of(texts.INTERPRETER), packages=packages)
    found = diagnose(bundle)
    assert found.roots == ()
    rows = [row for row in found.hypotheses if row.cause is Cause.OLD_INTERPRETER]
    assert all(row.verdict is Verdict.NOT_TESTED for row in rows)


def test_a_number_that_the_program_itself_makes_of_an_array_is_not_the_interpreters() -> None:
    """The same words of NumPy, of a line that is none of Triton's."""
    own = texts.INTERPRETER.replace("int(self.handle.data)", "int(kept.data)")
    assert "InterpreterError" in own
    assert diagnosis(own).roots == ()


def test_a_checkout_of_triton_is_no_program_of_the_users() -> None:
    folder = "/opt/lib/python3.12/site-packages"
    told = texts.INTERPRETER.replace(texts.TRITON, "")
    kept = told.replace(
        "triton.runtime.errors",
        f'  File "{folder}/triton/runtime/interpreter.py", line 1361, in __call__\n'
        "    raise InterpreterError(repr(e)) from e\ntriton.runtime.errors",
    )
    found = diagnosis(kept.replace(folder, "/src"))
    [seen] = [row for row in found.hypotheses if row.cause is Cause.OLD_INTERPRETER]
    assert (seen.kernel, seen.at) == ("sum_bags", "/home/ann/train.py:61")


def test_the_line_of_an_assertion_is_blamed_only_when_launches_were_waited_for() -> None:
    late = bundle_of(texts.ASSERTED)
    (root,) = diagnose(late).roots
    assert root.culprit is None
    waited = msgspec.structs.replace(late, environment={"CUDA_LAUNCH_BLOCKING": "1"})
    (root,) = diagnose(waited).roots
    assert root.culprit is not None
    assert root.culprit.place == "/home/ann/train.py:61"
    assert "CUDA_LAUNCH_BLOCKING" not in root.fix


def test_an_assertion_that_names_no_kernel_is_that_of_the_launch_whose_text_has_it() -> None:
    run = Run()
    run.tensor("x", "F32", 64, owner=FOREIGN)
    for name, text in (
        ("checks", 'tl.device_assert(x > 0, "ids lie inside")'),
        ("says", '"ids lie inside"'),
        ("other", "pass"),
    ):
        run.step += 1
        source = f"@triton.jit\ndef {name}_kernel(x):\n    {text}\n"
        run.emit(Launched, launch=run.launch(name, {}, {"x": "x"}, source=source, grid=(1,)))
    stderr = texts.ASSERTIONS.replace("indexSelectLargeIndex", "unknown").replace(
        "srcIndex < srcSelectDimSize", "ids lie inside"
    )
    bundle = run.bundle(fault_in(stderr, 1, None))
    [root] = diagnose(msgspec.structs.replace(bundle, stderr=stderr)).roots
    assert (root.cause, root.kernel) == (Cause.DEVICE_ASSERT, "checks")
