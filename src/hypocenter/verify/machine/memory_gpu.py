"""Triton kernels of the memory stage: write a pattern, and count the words that do not hold it."""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton


@triton.jit
def _word(place, kind, constant):
    """The word at a place: 0 the constant, 1 the place, 2 its complement, 3 a bit that walks."""
    word = tl.where(kind == 1, place, constant)
    word = tl.where(kind == 2, ~place, word)
    return tl.where(kind == 3, 1 << (place & 31), word)


@triton.jit(do_not_specialize=["num_words", "start", "kind", "constant"])
def write_kernel(words_ptr, num_words, start, kind, constant, BLOCK: tl.constexpr):
    """Formula: words[i] = the word of place start + i (`_word`).
    Shapes: words i32 [num_words].
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words_ptr + at, _word(start + at, kind, constant), mask=at < num_words)


@triton.jit(do_not_specialize=["num_words", "start", "kind", "constant"])
def look_kernel(words_ptr, found_ptr, num_words, start, kind, constant, BLOCK: tl.constexpr):
    """Formula: found[0] += the number of words that are not those of `_word`, and found[1] = the
    smallest i of one, where it is below.
    Shapes: words i32 [num_words]; found i32 [2].
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    words = tl.load(words_ptr + at, mask=inside, other=0)
    wrong = inside & (words != _word(start + at, kind, constant))
    number = tl.sum(wrong.to(tl.int32), axis=0)
    if number > 0:
        tl.atomic_add(found_ptr, number)
        tl.atomic_min(found_ptr + 1, tl.min(tl.where(wrong, at, 2147483647), axis=0))
