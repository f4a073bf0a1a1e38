"""Triton kernels that hash, as people write them: 32 bits are left on purpose."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201
from hypocenter.device.triton_lang import tl, triton


@triton.jit
def by_remainder(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """Knuth's multiplicative hash, reduced by a remainder."""
    at = tl.arange(0, BLOCK)
    slot = (tl.load(key_ptr + at).to(tl.uint32) * 2654435761) % num_slots
    tl.store(out_ptr + at, tl.load(table_ptr + slot))


@triton.jit
def by_quotient(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """The same hash by its upper bits, which a division takes."""
    at = tl.arange(0, BLOCK)
    slot = (tl.load(key_ptr + at).to(tl.uint32) * 2654435761) // (2**32 // num_slots + 1)
    tl.store(out_ptr + at, tl.load(table_ptr + slot))


@triton.jit
def by_shift(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """The same hash by its upper bits, which a shift takes."""
    at = tl.arange(0, BLOCK)
    slot = (tl.load(key_ptr + at).to(tl.uint32) * 2654435761) >> 28
    tl.store(out_ptr + at, tl.load(table_ptr + slot))


@triton.jit
def by_signed_shift(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """Signed, so that half of the upper bits are below 0."""
    at = tl.arange(0, BLOCK)
    slot = ((tl.load(key_ptr + at) * -1640531535) >> 28) + 8
    tl.store(out_ptr + at, tl.load(table_ptr + slot))


@triton.jit
def by_mask(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """Signed, and masked."""
    at = tl.arange(0, BLOCK)
    slot = (tl.load(key_ptr + at) * -1640531535) & (num_slots - 1)
    tl.store(out_ptr + at, tl.load(table_ptr + slot))


@triton.jit
def made_positive(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """A signed product whose remainder is put into the table."""
    at = tl.arange(0, BLOCK)
    slot = (tl.load(key_ptr + at) * 1000003 % num_slots + num_slots) % num_slots
    tl.store(out_ptr + at, tl.load(table_ptr + slot))


@triton.jit
def generator(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """A linear congruential generator of four steps, of the numbers of Numerical Recipes."""
    at = tl.arange(0, BLOCK)
    state = tl.load(key_ptr + at).to(tl.uint32)
    for _ in range(4):
        state = state * 1664525 + 1013904223
    tl.store(out_ptr + at, tl.load(table_ptr + state % num_slots))


@triton.jit
def fnv(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """FNV-1a over the four bytes of a key."""
    at = tl.arange(0, BLOCK)
    key = tl.load(key_ptr + at).to(tl.uint32)
    hashed = tl.full((BLOCK,), 2166136261, tl.uint32)
    for byte in range(4):
        hashed = (hashed ^ ((key >> (8 * byte)) & 255)) * 16777619
    tl.store(out_ptr + at, tl.load(table_ptr + hashed % num_slots))


@triton.jit
def murmur(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """The last mix of MurmurHash3."""
    at = tl.arange(0, BLOCK)
    hashed = tl.load(key_ptr + at).to(tl.uint32)
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
    hashed = hashed ^ (hashed >> 16)
    tl.store(out_ptr + at, tl.load(table_ptr + hashed % num_slots))


@triton.jit
def xxhash(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """xxHash32 of one key, without its last mix but for the product."""
    at = tl.arange(0, BLOCK)
    hashed = tl.load(key_ptr + at).to(tl.uint32) * 3266489917 + 374761397
    hashed = ((hashed << 17) | (hashed >> 15)) * 668265263
    tl.store(out_ptr + at, tl.load(table_ptr + (hashed * 2246822519) % num_slots))


@triton.jit
def philox(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """Random numbers of Triton's own."""
    at = tl.arange(0, BLOCK)
    drawn = tl.randint(7, tl.load(key_ptr + at)).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + at, tl.load(table_ptr + drawn % num_slots))


@triton.jit
def rolling(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """A rolling hash of four neighbours, signed until it is reduced."""
    at = tl.arange(0, BLOCK)
    hashed = tl.zeros((BLOCK,), tl.int32)
    for near in range(4):
        hashed = hashed * 1000003 + tl.load(key_ptr + (at + near) % BLOCK)
    slot = hashed.to(tl.uint32, bitcast=True) % num_slots
    tl.store(out_ptr + at, tl.load(table_ptr + slot))


@triton.jit
def of_levels(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """Fibonacci's hash, signed, into each of four tables of four slots."""
    at = tl.arange(0, BLOCK)
    slot = ((tl.load(key_ptr + at) * 1640531527) >> 30) + 2
    for level in range(4):
        tl.store(out_ptr + at, tl.load(table_ptr + level * 4 + slot))


@triton.jit
def of_quotients(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """Such a hash by a division, into each of eight tables of two slots."""
    at = tl.arange(0, BLOCK)
    slot = (tl.load(key_ptr + at).to(tl.uint32) * 2654435761) // (1 << 31)
    for level in range(8):
        tl.store(out_ptr + at, tl.load(table_ptr + level * 2 + slot))


@triton.jit
def signed_remainder(key_ptr, table_ptr, out_ptr, num_slots: tl.constexpr, BLOCK: tl.constexpr):
    """Wrong: the remainder of a product below 0 is below 0, before the table."""
    at = tl.arange(0, BLOCK)
    slot = (tl.load(key_ptr + at) * 1000003) % num_slots
    tl.store(out_ptr + at, tl.load(table_ptr + slot))


@triton.jit
def wrapped_rows(x_ptr, y_ptr, first, n_cols, stride, BLOCK: tl.constexpr):
    """Wrong: the flat number goes once around 32 bits and comes out inside, at another row."""
    at = (first.to(tl.int32) + tl.program_id(0)) * 65536 + tl.arange(0, BLOCK)
    row, col = at // n_cols, at % n_cols
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + row.to(tl.int64) * stride + col))


@triton.jit
def row_by_index(x_ptr, ids_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    """Wrong where the stride is: the product leaves 32 bits, and the tensor with 64 as well."""
    c = tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + tl.program_id(0))
    tl.store(out_ptr + c, tl.load(x_ptr + row * stride + c))
