"""Tables of features looked up by hashes of 32 bits, beside the same hashes of the host."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def knuth(id_ptr, table_ptr, out_ptr, n, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    slot = (tl.load(id_ptr + at, mask=mask, other=0).to(tl.uint32) * 2654435761) % num_slots
    tl.store(out_ptr + at, tl.load(table_ptr + slot, mask=mask), mask=mask)


@triton.jit
def fnv(id_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(id_ptr + at, mask=at < n, other=0).to(tl.uint32)
    hashed = tl.full((BLOCK,), 2166136261, tl.uint32)
    for byte in range(4):
        hashed = (hashed ^ ((value >> (8 * byte)) & 255)) * 16777619
    tl.store(out_ptr + at, hashed.to(tl.int64), mask=at < n)


@triton.jit
def murmur(id_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hashed = tl.load(id_ptr + at, mask=at < n, other=0).to(tl.uint32)
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
    tl.store(out_ptr + at, (hashed ^ (hashed >> 16)).to(tl.int64), mask=at < n)


@triton.jit
def generator(id_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(id_ptr + at, mask=at < n, other=0)
    state = state * 1664525 + 1013904223
    tl.store(out_ptr + at, state, mask=at < n)


@triton.jit
def combined(id_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Two neighbours in one key, as for n-grams."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(id_ptr + at, mask=at < n, other=0)
    second = tl.load(id_ptr + at + 1, mask=at + 1 < n, other=0)
    tl.store(out_ptr + at, first * 1000003 + second, mask=at < n)


def mixed(value):
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return value ^ (value >> 16)


def main():
    torch.manual_seed(0)
    n, num_slots = 200, 61
    ids = torch.randint(1, 2**31 - 1, (n,), dtype=torch.int32, device=DEVICE)
    wide = ids.long()
    table = torch.randn(num_slots, device=DEVICE)
    grid = (triton.cdiv(n, 64),)

    found = torch.empty(n, device=DEVICE)
    knuth[grid](ids, table, found, n, num_slots=num_slots, BLOCK=64)
    assert torch.equal(found, table[(wide * 2654435761 & 0xFFFFFFFF) % num_slots])

    hashes = torch.empty(n, dtype=torch.int64, device=DEVICE)
    fnv[grid](ids, hashes, n, BLOCK=64)
    want = torch.full((n,), 2166136261, device=DEVICE)
    for byte in range(4):
        want = ((want ^ ((wide >> (8 * byte)) & 255)) * 16777619) & 0xFFFFFFFF
    assert torch.equal(hashes, want)

    murmur[grid](ids, hashes, n, BLOCK=64)
    assert torch.equal(hashes, mixed(wide))

    narrow = torch.empty(n, dtype=torch.int32, device=DEVICE)
    generator[grid](ids, narrow, n, BLOCK=64)
    assert torch.equal(narrow, ids * 1664525 + 1013904223)  # 32 bits on both sides
    combined[grid](ids, narrow, n, BLOCK=64)
    assert torch.equal(
        narrow.long() & 0xFFFFFFFF,
        (wide * 1000003 + wide.roll(-1).index_fill_(0, torch.tensor([n - 1], device=DEVICE), 0))
        & 0xFFFFFFFF,
    )
    print("ok")


if __name__ == "__main__":
    main()
