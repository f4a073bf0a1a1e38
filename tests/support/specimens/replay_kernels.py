"""Small Triton kernels, right and wrong, for tests that interpret or replay them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201
from hypocenter.device.triton_lang import tl, triton

SCALE = tl.constexpr(3)


@triton.jit
def twice(x):
    return x + x


@triton.jit
def arithmetic(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Inner functions, reductions, chained comparison, a loop, a constant of the module."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=(offs >= 0) & (offs < n), other=0.0)
    total = tl.sum(x, 0) + tl.max(x, 0)
    for step in range(0, n, BLOCK):
        total += step
    tl.store(y_ptr + offs, twice(x) * SCALE + total + tl.cdiv(n, 2), mask=offs < n)


@triton.jit
def half_precision(x_ptr, w_ptr, y_ptr, d_ptr, N: tl.constexpr):
    """bfloat16 arithmetic, comparison, a constant and dot, with no cast in the kernel."""
    at = tl.arange(0, N)
    square = at[:, None] * N + at[None, :]
    x, w = tl.load(x_ptr + square), tl.load(w_ptr + square)
    y = tl.where(x > w, x * w, x - w)
    tl.store(y_ptr + square, tl.full((N, N), 1.005, tl.bfloat16) - y)
    tl.store(d_ptr + square, tl.dot(x, w))


@triton.jit
def fails(x_ptr):
    tl.store(x_ptr, tl.no_such_function(1))


@triton.jit
def scaled_rows(x_ptr, y_ptr, x_stride, y_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    tl.store(y_ptr + row * y_stride + cols, x * 2, mask=mask)


@triton.jit
def scaled_rows_wide(x_ptr, y_ptr, x_stride, y_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    tl.store(y_ptr + row * y_stride + cols, x * 2, mask=mask)


@triton.jit
def flattened(x_ptr, y_ptr, n_cols, stride, BLOCK: tl.constexpr):
    """Rows and columns from one flat number, which may leave int32 before it is divided."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, col = at // n_cols, at % n_cols
    x = tl.load(x_ptr + row.to(tl.int64) * stride + col)
    tl.store(y_ptr + row.to(tl.int64) * stride + col, x)


@triton.jit
def unmasked(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def accumulate(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(y_ptr + offs, tl.load(y_ptr + offs, mask=mask) + tl.load(x_ptr + offs, mask=mask),
             mask=mask)  # fmt: skip


@triton.jit
def histogram(x_ptr, bins_ptr, n, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bins = tl.load(x_ptr + offs, mask=offs < n, other=0)
    if ATOMIC:
        tl.atomic_add(bins_ptr + bins, 1, mask=offs < n)
    else:
        tl.store(bins_ptr + bins, tl.load(bins_ptr + bins, mask=offs < n) + 1, mask=offs < n)


@triton.jit
def shift_in_place(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs + 1, mask=offs + 1 < n)
    tl.store(x_ptr + offs, x, mask=offs + 1 < n)


@triton.jit
def scatter_one_store(y_ptr, BLOCK: tl.constexpr, EQUAL: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    value = offs * 0 if EQUAL else offs
    tl.store(y_ptr + offs // 2, value)


@triton.jit
def locked_sum(x_ptr, sum_ptr, lock_ptr, BLOCK: tl.constexpr, LOCKED: tl.constexpr):
    """Adds blocks of x to one block, in turn; without the lock the programs race."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + offs)
    if LOCKED:
        while tl.atomic_cas(lock_ptr, 0, 1) == 1:
            pass
    tl.store(sum_ptr + offs, tl.load(sum_ptr + offs) + x)
    if LOCKED:
        tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def last_one_sums(x_ptr, part_ptr, y_ptr, count_ptr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Each program leaves a partial sum; the last to count itself adds them up."""
    program = tl.program_id(0)
    x = tl.load(x_ptr + program * BLOCK + tl.arange(0, BLOCK))
    tl.store(part_ptr + program, tl.sum(x, 0))
    if tl.atomic_add(count_ptr, 1) == PARTS - 1:
        tl.store(y_ptr, tl.sum(tl.load(part_ptr + tl.arange(0, PARTS)), 0))


@triton.jit
def sum_of(a, b):
    return a + b


@triton.jit
def scans_for_long(out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.associative_scan(at * 0, 0, sum_of))


@triton.jit
def walks_to_an_end(steps_ptr, out_ptr, end):
    row = tl.program_id(0)
    step = tl.load(steps_ptr + row)
    at = 0
    while at < end:
        at += step
    tl.store(out_ptr + row, at)


@triton.jit
def waits_for_a_later_one(flag_ptr):
    if tl.program_id(0) == 0:
        while tl.atomic_add(flag_ptr, 0) == 0:
            pass
    else:
        tl.atomic_add(flag_ptr, 1)


@triton.jit
def counts_up(x_ptr, n):
    for _ in range(n):
        tl.store(x_ptr, tl.load(x_ptr) + 1)


@triton.jit
def through_nothing(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    nothing = (x_ptr.to(tl.int64) * 0).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + offs, tl.load(nothing + offs))


@triton.jit
def biased(x_ptr, bias_ptr, y_ptr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    if HAS_BIAS:
        x += tl.load(bias_ptr + offs)
    tl.store(y_ptr + offs, x)


@triton.jit
def tile(desc_ptr, y_ptr, rows, cols, M: tl.constexpr, N: tl.constexpr):
    """A descriptor made in the kernel: what lies outside its shape reads as zero."""
    desc = tl.make_tensor_descriptor(
        desc_ptr, shape=[rows, cols], strides=[cols, 1], block_shape=[M, N]
    )
    block = desc.load([tl.program_id(0) * M, 0])
    at = (tl.program_id(0) * M + tl.arange(0, M))[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y_ptr + at, block)


@triton.jit
def host_tile(desc, y_ptr, M: tl.constexpr, N: tl.constexpr):
    block = desc.load([tl.program_id(0) * M, 0])
    at = (tl.program_id(0) * M + tl.arange(0, M))[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y_ptr + at, block)


@triton.jit
def hashed(y_ptr, BLOCK: tl.constexpr):
    """int32 arithmetic that is meant to wrap and never becomes an address."""
    offs = tl.arange(0, BLOCK)
    mixed = (offs + 12345) * 1103515245 + 12345
    tl.store(y_ptr + offs, mixed & 0xFF)


@triton.jit
def asserts(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK >= 16, "BLOCK below 16")
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)


@triton.jit
def block_tile(x_ptr, y_ptr, rows, M: tl.constexpr, N: tl.constexpr):
    """Block pointers."""
    source = tl.make_block_ptr(x_ptr, (rows, N), (N, 1), (tl.program_id(0) * M, 0), (M, N), (1, 0))
    block = tl.load(source, boundary_check=(0,), padding_option="zero")
    target = tl.make_block_ptr(y_ptr, (rows, N), (N, 1), (0, 0), (M, N), (1, 0))
    tl.store(tl.advance(target, (tl.program_id(0) * M, 0)), block, boundary_check=(0,))


@triton.jit
def count_up(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)


@triton.jit
def store_and_look(x_ptr, y_ptr):
    tl.store(x_ptr, tl.program_id(0))
    tl.store(y_ptr + tl.program_id(0), tl.load(x_ptr))


@triton.jit
def counted_rows(x_ptr, stride):
    """Far beyond a grid its programs take so long that no probe of them ends."""
    row = tl.program_id(0)
    for _ in range(row):
        tl.load(x_ptr)
    tl.load(x_ptr + row * stride)


@triton.jit
def meets_all(count_ptr, expected):
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1)
    while tl.atomic_add(count_ptr, 0) < expected:
        pass


@triton.jit
def two_phases(x_ptr, y_ptr, out_ptr, count_ptr, expected, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    own, other = tl.program_id(0), (tl.program_id(0) + 1) % tl.num_programs(0)
    tl.store(y_ptr + own * BLOCK + at, tl.load(x_ptr + own * BLOCK + at) * 2)
    meets_all(count_ptr, expected)
    taken = tl.load(y_ptr + other * BLOCK + at)
    meets_all(count_ptr, 2 * expected)
    tl.store(out_ptr + own * BLOCK + at, taken)


@triton.jit
def waits_for_nobody(flag_ptr):
    while tl.load(flag_ptr) == 0:
        pass


@triton.jit
def reads_one_word_often(x_ptr, out_ptr, n):
    total = 0.0
    for _ in range(n):
        total += tl.load(x_ptr)
    tl.store(out_ptr, total)


@triton.jit
def back_by_others(x_ptr, y_ptr, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + at, tl.load(x_ptr + BLOCK - 1 - at))


@triton.jit
def adds_around(x_ptr, SHIFT: tl.constexpr, SAME: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    own = tl.load(x_ptr + at)
    next_one = tl.load(x_ptr + at + SHIFT)
    tl.store(x_ptr + at, own * 0 if SAME else own + 1)
    tl.store(x_ptr + at + SHIFT, next_one * 0 if SAME else next_one + 2)


@triton.jit
def sums_left_out(x_ptr, out_ptr, n, HOW: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask)
    if HOW == "sum":
        tl.store(out_ptr + at, x - tl.sum(x), mask=mask)
    elif HOW == "where":
        tl.store(out_ptr + at, x - tl.sum(tl.where(mask, x, 0.0)), mask=mask)
    elif HOW == "same mask":
        tl.store(out_ptr + at, tl.exp(x.to(tl.float32)) * 2, mask=mask)
    elif HOW == "other mask":
        tl.store(out_ptr + at, x, mask=at <= n)
    elif HOW == "branch":
        if tl.max(x) > 0:
            tl.store(out_ptr + at, 1.0, mask=mask)
    elif HOW == "address":
        tl.store(out_ptr + x.to(tl.int32) % 2, 1.0)
    elif HOW == "mask":
        tl.store(out_ptr + at, 1.0, mask=x > 0)
    elif HOW == "narrowed mask":
        tl.store(out_ptr + at, 1.0, mask=mask & (x > 0))
    elif HOW == "cumsum":
        tl.store(out_ptr + at, tl.cumsum(x, 0), mask=mask)
    elif HOW == "reversed cumsum":
        tl.store(out_ptr + at, tl.cumsum(x, 0, reverse=True), mask=mask)


@triton.jit
def rows_left_out(x_ptr, out_ptr, m, n, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    row, col = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (row < m) & (col < n) if BOTH else (row < m) & (col < BLOCK)
    x = tl.load(x_ptr + row * BLOCK + col, mask=inside)
    rows = tl.arange(0, BLOCK)
    tl.store(out_ptr + rows, tl.sum(tl.trans(tl.trans(x)), axis=1), mask=rows < m)


@triton.jit
def scalar_left_out(x_ptr, out_ptr, at, OTHER: tl.constexpr):
    mask = at >= 0
    x = tl.load(x_ptr + at, mask=mask, other=0.0) if OTHER else tl.load(x_ptr + at, mask=mask)
    tl.store(out_ptr, x)


@triton.jit
def raises_flag(flag_ptr, VALUE: tl.constexpr):
    tl.store(flag_ptr, VALUE + tl.program_id(0) * (VALUE == 2))


@triton.jit
def between_ends(x_ptr, y_ptr, begin, end_load, end_store, BLOCK: tl.constexpr):
    at = begin + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < end_load, other=0.0)
    tl.store(y_ptr + at, x, mask=at < end_store)


@triton.jit
def tile_to_row(
    x_ptr, y_ptr, num_rows, num_columns, stride, MASK_ROWS: tl.constexpr,
    MASK_COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row >= 0) & (column >= 0)
    if MASK_ROWS:
        mask = mask & (row < num_rows)
    if MASK_COLUMNS:
        mask = mask & (column < num_columns)
    x = tl.load(x_ptr + row * stride + column, mask=mask, other=0.0)
    tl.store(y_ptr + row * 512 + column, x, mask=mask & (column < 512) & (row < 128))
