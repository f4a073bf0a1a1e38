"""The random number that chooses a token: who draws and who checks a draw have it from here."""

from __future__ import annotations

_WORD = 0xFFFFFFFF


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position, with 53 bits: no state, so no order matters."""
    counter = (position & _WORD, position >> 32 & _WORD, 0, 0)
    words = philox4x32(counter, (seed & _WORD, seed >> 32 & _WORD))
    return (words[0] << 21 | words[1] >> 11) * 2.0**-53


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words from a counter and a key.

    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), section 4.3;
    the constants are those of its reference library Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
