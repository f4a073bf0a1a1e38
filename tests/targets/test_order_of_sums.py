"""Both forms of attention add columns in one order as NVIDIA's compiler has them.

A matrix instruction adds 16 columns at a time. Which 16 is Triton's choice, by how many neighbours
a thread holds (`kWidth`): of numbers that came of bytes twice as many as of halves, but not with
the larger instruction of Hopper. A request alone and in company would differ in bits.
"""

from __future__ import annotations

import re

import pytest

from hypocenter.base.tensor import DType
from hypocenter.device.limits import named_gpu
from hypocenter.device.offline.abstract import specimens
from hypocenter.device.offline.compile import compile_source, triton_source
from hypocenter.kernels.attention import attention_gpu
from hypocenter.model.offline.specimens import AbstractModel


@pytest.mark.parametrize("kv_dtype", [DType.F16, DType.Q8_0, DType.Q4_0])
@pytest.mark.parametrize(("arch", "is_wide"), [("sm_90", True), ("sm_80", False)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_both_forms_take_the_same_columns_together(
    kv_dtype: DType, arch: str, is_wide: bool, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_gpu, "has_wide_tiles", lambda _: is_wide)
    limits = named_gpu(arch)
    widths: dict[str, set[str]] = {}
    for num_tokens in (1, 512):
        model = AbstractModel("nvidia", "llama", DType.Q8_0, kv_dtype, {"head_dim": head_dim})
        for made in model.plan(num_tokens).launches:
            if made.kernel in ("attention", "attention_split"):
                (specimen,) = specimens([made], "a form")
                source = triton_source(specimen, limits)
                compiled = compile_source(source, limits, specimen.options)
                found = re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"])
                widths[made.kernel] = set(found)
    assert set(widths) == {"attention", "attention_split"}
    assert widths["attention"] == widths["attention_split"] != set()
