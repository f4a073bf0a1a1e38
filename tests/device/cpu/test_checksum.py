"""A checksum is XXH64's, and tells any bit that was changed."""

from __future__ import annotations

import numpy as np
import pytest

from hypocenter.device.cpu.checksum import checksum_of


def of(text: bytes) -> str:
    return checksum_of(np.frombuffer(text, np.uint8).copy())[::-1].hex()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "ef46db3751d8e999"),
        (b"a", "d24ec4f1a98c6e5b"),
        (b"abc", "44bc2cf5ad770999"),
        (b"Nobody inspects the spammish repetition", "fbcea83c8a378bf1"),
    ],
)
def test_known_texts(text: bytes, expected: str) -> None:
    """Known from xxHash's own programs; the last has stripes, a word, a half and bytes."""
    assert of(text) == expected


def test_any_bit_and_any_place_counts() -> None:
    data = np.random.RandomState(1).randint(0, 256, 79).astype(np.uint8)
    found = {checksum_of(data)}
    for at in range(data.size):
        for bit in range(8):
            changed = data.copy()
            changed[at] ^= 1 << bit
            found.add(checksum_of(changed))
    assert len(found) == 1 + 8 * data.size
    swapped = data.copy()
    swapped[:32], swapped[32:64] = data[32:64], data[:32]
    both_signs = data.copy()
    both_signs[[7, 39]] ^= 128  # of words of one lane
    for changed in (swapped, both_signs, data[:-1], np.append(data, np.uint8(0))):
        assert checksum_of(np.ascontiguousarray(changed)) not in found
