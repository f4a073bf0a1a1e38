"""Each tensor of a file gets the type that `llama-quantize` gives it.

Its choices were recorded with a dry run (`tests/peer/test_quantiser_llama_cpp.py`), as digests of a
line for each tensor in its order: the name and the type.
"""

from __future__ import annotations

import json

import pytest
from models.block_cases import digest_of_types
from models.unquantised_gguf import NUM_HEADS, shapes_of
from repository import ROOT

from hypocenter.base.tensor import DType
from hypocenter.model.gguf.values import TensorInfo
from hypocenter.model.quantising.mixes import (
    MIXES,
    OF_NO_PROGRAM,
    Chooser,
    ModelSizes,
    in_order,
    is_quantised_by_name,
    layer_of,
    needs_weights,
)

RECORDED = json.loads((ROOT / "tests/fixtures/types_of_mixes.json").read_text())


def _infos(**wanted: int | bool) -> list[TensorInfo]:
    return [_info(name, shape) for name, shape in shapes_of(**wanted).items()]  # type: ignore[arg-type]


def _info(name: str, shape: tuple[int, ...]) -> TensorInfo:
    dtype = DType.F16 if len(shape) > 1 else DType.F32
    return TensorInfo(name, dtype, shape, 0, 0, 0)


def _types(mix: str, wanted: dict[str, int], *, weighed: bool = False) -> dict[str, str]:
    infos = in_order(_infos(**wanted))
    num_heads, num_kv = NUM_HEADS, wanted.get("num_kv_heads", 2)
    num_layers, num_experts = wanted["num_layers"], wanted.get("num_experts", 0)
    sizes = ModelSizes(num_layers, num_experts, num_heads // num_kv, num_layers == 80)
    names = [info.name for info in infos]
    chooser = Chooser(MIXES[mix], sizes, names, has_weights=weighed)
    return {info.name: chooser.choose(info)[0].name for info in infos}


@pytest.mark.parametrize("model", RECORDED["models"])
def test_types_are_those_of_llama_quantize(model: str) -> None:
    wanted, known = RECORDED["models"][model], RECORDED["types"][model]
    found = {}
    for mix in (mix for mix in MIXES if mix not in OF_NO_PROGRAM):
        for weighed in (False, True):
            name = f"{mix} weighed" if weighed else mix
            if known[name] is not None:  # llama.cpp writes it
                found[name] = digest_of_types(_types(mix, wanted, weighed=weighed))
    assert found == {name: types for name, types in known.items() if types is not None}


def test_some_layers_get_more_bits() -> None:
    types = _types("Q4_K_M", {"num_layers": 9})
    more = [name for name, dtype in types.items() if dtype == "Q6_K"]
    assert more == [
        "output.weight",
        *(
            f"blk.{layer}.{part}.weight"
            for layer in (0, 3, 6, 7, 8)
            for part in ("attn_v", "ffn_down")
        ),
    ]
    assert types["blk.1.attn_q.weight"] == types["token_embd.weight"] == "Q4_K"
    assert types["blk.1.attn_norm.weight"] == "F32"


def test_tensors_are_in_the_order_of_layers() -> None:
    infos = [_info(name, (256,)) for name in ("blk.10.a", "output.b", "blk.2.b", "blk.2.a", "z")]
    assert [info.name for info in in_order(infos)] == [
        "output.b", "z", "blk.2.a", "blk.2.b", "blk.10.a",
    ]  # fmt: skip
    assert [layer_of(name) for name in ("blk.10.a", "v.blk.3.a", "blk.a")] == [10, -1, -1]


@pytest.mark.parametrize(
    ("name", "shape", "is_changed"),
    [
        ("blk.0.attn_q.weight", (256, 256), True),
        ("blk.0.attn_q.bias", (1, 256), False),
        ("blk.0.attn_norm.weight", (256,), False),
        ("blk.0.ffn_gate_inp.weight", (8, 256), False),
        ("position_embd.weight", (8, 256), False),
        ("blk.0.ssm_conv1d.weight", (256, 4), False),
        ("blk.0.attn_q_norm.weight", (8, 256), False),
    ],
)
def test_what_stays_as_it_is(name: str, shape: tuple[int, ...], is_changed: bool) -> None:
    assert is_quantised_by_name(_info(name, shape)) == is_changed


def test_which_types_need_an_importance_matrix() -> None:
    assert needs_weights("blk.0.attn_q.weight", DType.IQ2_XS, MIXES["IQ2_XS"])
    assert needs_weights("blk.0.attn_q.weight", DType.Q2_K, MIXES["Q2_K_S"])
    assert not needs_weights("blk.0.attn_q.weight", DType.Q2_K, MIXES["Q2_K"])
    assert not needs_weights("output.weight", DType.IQ3_XXS, MIXES["IQ3_XXS"])
