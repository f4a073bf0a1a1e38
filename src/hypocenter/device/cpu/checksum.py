"""A checksum of the host's bytes, compiled: it tells damage, and is no proof against a forger."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.cpu.lang import host_function, inline

#: The primes of XXH64.
_FIRST, _SECOND, _THIRD, _FOURTH, _FIFTH = (
    np.uint64(prime)
    for prime in (
        *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
        *(0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5),
    )
)
_STRIPE_WORDS = 4


@inline
def _rotate(value: Any, num_bits: int) -> Any:
    return (value << np.uint64(num_bits)) | (value >> np.uint64(64 - num_bits))


@inline
def _mix(sum_before: Any, word: Any) -> Any:
    return _rotate(sum_before + word * _SECOND, 31) * _FIRST


@inline
def _join(found: Any, sum_of_lane: Any) -> Any:
    return (found ^ _mix(np.uint64(0), sum_of_lane)) * _FIRST + _FOURTH


@host_function
def _xxh64(words: Any, rest: Any, found: Any) -> None:
    """Formula: found[0] = XXH64 of the bytes of `words` u64 [num_words] and `rest` u8 [below 8],
    with a seed of 0.
    Source: doc/xxhash_spec.md of xxHash, "XXH64 Algorithm Description".
    """
    num_striped = len(words) // _STRIPE_WORDS * _STRIPE_WORDS
    if num_striped:
        one, two = _FIRST + _SECOND, _SECOND
        three, four = np.uint64(0), np.uint64(0) - _FIRST
        for at in range(0, num_striped, _STRIPE_WORDS):
            one = _mix(one, words[at])
            two = _mix(two, words[at + 1])
            three = _mix(three, words[at + 2])
            four = _mix(four, words[at + 3])
        total = _rotate(one, 1) + _rotate(two, 7) + _rotate(three, 12) + _rotate(four, 18)
        for lane in (one, two, three, four):
            total = _join(total, lane)
    else:
        total = _FIFTH
    total += np.uint64(8 * len(words) + len(rest))
    for at in range(num_striped, len(words)):
        total = _rotate(total ^ _mix(np.uint64(0), words[at]), 27) * _FIRST + _FOURTH
    at = 0
    if len(rest) >= 4:
        word = np.uint64(0)
        for byte in range(4):
            word |= np.uint64(rest[byte]) << np.uint64(8 * byte)
        total = _rotate(total ^ (word * _FIRST), 23) * _SECOND + _THIRD
        at = 4
    for byte in range(at, len(rest)):
        total = _rotate(total ^ (np.uint64(rest[byte]) * _FIFTH), 11) * _FIRST
    total = (total ^ (total >> np.uint64(33))) * _SECOND
    total = (total ^ (total >> np.uint64(29))) * _THIRD
    found[0] = total ^ (total >> np.uint64(32))


def checksum_of(data: Array) -> bytes:
    """XXH64 of u8 [num_bytes], contiguous and at an address that words may have; 8 bytes.

    Other threads go on meanwhile.
    """
    num_words = data.nbytes // 8
    found = np.empty(1, np.uint64)
    _xxh64(data[: 8 * num_words].view(np.uint64), data[8 * num_words :], found)
    return found.tobytes()
