"""Ways in which a recorded launch is made again on a GPU, and what came of each."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hypocenter.record.events import LaunchRecord

#: Variables with which neither LLVM nor NVIDIA's assembler optimises.
_PLAIN = {"DISABLE_LLVM_OPT": "1", "DISABLE_PTXAS_OPT": "1"}


class RunForm(msgspec.Struct, frozen=True, kw_only=True):
    """A way to make the launch: options of Triton's beside those recorded, on GPU `device`.

    A GPU that is not there is told as such. `num_runs` launches are made, each on fresh memory.
    """

    options: dict[str, int] = {}
    device: int = 0
    num_runs: int = 1


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a form: of each run the bytes of all tensors, from the first element to the
    last; or the `problem` that there was. `card` is the GPU's id, `binary` the sha256 of its code.
    """

    runs: tuple[dict[str, bytes], ...] = ()
    card: str = ""
    name: str = ""
    binary: str = ""
    problem: str = ""


def with_other_warps(form: RunForm, launch: LaunchRecord) -> RunForm:
    """The form with a number of warps that neither it nor the launch has."""
    taken = {form.options.get("num_warps", launch.num_warps), launch.num_warps}
    num_warps = next(number for number in (4, 2, 8) if number not in taken)
    return msgspec.structs.replace(form, options={**form.options, "num_warps": num_warps})


def other_forms(launch: LaunchRecord, device: int) -> Iterator[tuple[str, RunForm, dict[str, str]]]:
    """Other code for the same launch: what is different, the form, variables of the environment.

    Arithmetic is the same in all, so that results are the same but for rounding.
    """
    if launch.options.get("num_stages") != 1:
        yield "num_stages = 1", RunForm(options={"num_stages": 1}, device=device), {}
    num_warps = launch.num_warps // 2 if launch.num_warps > 1 else 2
    yield f"num_warps = {num_warps}", RunForm(options={"num_warps": num_warps}, device=device), {}
    yield "no optimisation by LLVM and ptxas", RunForm(device=device), _PLAIN
