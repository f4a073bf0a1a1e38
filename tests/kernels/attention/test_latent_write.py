"""latent_write against plain assignment: where each column goes, what stays, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_forms import FORMS, use_form
from ops.kernel_launch import Array, bits, counts, launch, rows_tensor, tensor, transposed

from hypocenter.base.errors import LaunchRejected
from hypocenter.device.copies import to_host
from hypocenter.kernels.attention.latent_write import latent_write

BLOCK_SIZE, NUM_BLOCKS = 16, 5


@pytest.fixture(params=FORMS, autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_form(request.param, monkeypatch)


def write(
    first: Array, latent: Array, slots: list[int], kind: Any = np.float32, **shape: Any
) -> tuple[Array, Array]:
    """Both caches after the write, which were full of sevens; two more rows are not live."""
    head_dim, rank = first.shape[1] + latent.shape[1], latent.shape[1]
    pages = (NUM_BLOCKS, shape.get("num_kv_heads", 1))
    pitch = shape.get("pitch", -(-rank // 16) * 16)
    caches = [
        np.full((*pages, head_dim, BLOCK_SIZE), 7, kind),
        np.full((*pages, BLOCK_SIZE, pitch), 7, kind),
    ]
    if kind is np.float16:
        caches = [cache.view(np.uint16) for cache in caches]
    lay = transposed if kernel_launch.device == "cpu" else tensor
    keys, values = (lay(name, x) for name, x in zip(("k_cache", "v_cache"), caches, strict=True))
    given = [
        rows_tensor(name, np.concatenate([x, np.full((2, x.shape[1]), np.nan, np.float32)]))
        for name, x in (("rotated", first), ("latent", latent))
    ]
    at = tensor("slots", np.array([*slots, 1 << 20, -1], np.int32))
    launch(
        lambda p: latent_write(
            p,
            given[0],
            given[1],
            at,
            keys,
            values,
            counts(len(slots)),
            rank=shape.get("rank", rank),
        ),
        len(first) + 2,
    )
    return to_host(keys).view(kind), to_host(values).view(kind)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize(("num_rotated", "rank"), [(6, 20), (64, 512), (1, 16)])
def test_latents_stand_in_both_caches(num_rotated: int, rank: int, kind: Any) -> None:
    rng = np.random.default_rng(rank)
    slots = [37, 0, 79]
    first, latent = (
        rng.standard_normal((3, width)).astype(np.float32) for width in (num_rotated, rank)
    )
    keys, values = write(first, latent, slots, kind)
    key: Array = np.full((NUM_BLOCKS, 1, num_rotated + rank, BLOCK_SIZE), 7, kind)
    value: Array = np.full((NUM_BLOCKS, 1, BLOCK_SIZE, rank), 7, kind)
    for row, slot in enumerate(slots):
        block, within = divmod(slot, BLOCK_SIZE)
        key[block, 0, :, within] = np.concatenate([first[row], latent[row]])
        value[block, 0, within] = latent[row]
    assert (bits(keys.astype(np.float32)) == bits(key.astype(np.float32))).all()
    assert (bits(values[..., :rank].astype(np.float32)) == bits(value.astype(np.float32))).all()


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"num_kv_heads": 2}, "all heads read the same latent"),
        ({"rank": 26}, "a key must have a part that is rotated"),
        ({"rank": 0}, "rank is 0, but must be above 0"),
        ({"pitch": 16}, "values are written as whole vectors of 16"),
    ],
)
def test_what_is_refused(shape: dict[str, Any], text: str) -> None:
    with pytest.raises(LaunchRejected, match=text):
        write(np.zeros((1, 6), np.float32), np.zeros((1, 20), np.float32), [0], **shape)
