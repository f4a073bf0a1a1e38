"""Sort the tokens of a batch by expert: count, offsets, scatter, gather; buffers live across steps."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def count_experts(e_ptr, count_ptr, T, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(e_ptr + t, mask=t < T, other=0)
    tl.atomic_add(count_ptr + e, 1, mask=t < T)


@triton.jit
def expert_offsets(count_ptr, start_ptr, E, BLOCK: tl.constexpr):
    e = tl.arange(0, BLOCK)
    n = tl.load(count_ptr + e, mask=e < E, other=0)
    tl.store(start_ptr + e, tl.cumsum(n, axis=0) - n, mask=e < E)


@triton.jit
def scatter_tokens(e_ptr, start_ptr, perm_ptr):
    t = tl.program_id(0)
    place = tl.atomic_add(start_ptr + tl.load(e_ptr + t), 1)
    tl.store(perm_ptr + place, t)


@triton.jit
def gather_tokens(x_ptr, perm_ptr, y_ptr, D: tl.constexpr):
    i = tl.program_id(0)
    d = tl.arange(0, D)
    t = tl.load(perm_ptr + i)
    tl.store(y_ptr + i * D + d, tl.load(x_ptr + t * D + d))


class Router:
    def __init__(self, E, max_tokens):
        self.E = E
        self.counts = torch.zeros(E, dtype=torch.int32, device=DEV)
        self.start = torch.empty(E, dtype=torch.int32, device=DEV)
        self.perm = torch.full((max_tokens,), -1, dtype=torch.int32, device=DEV)

    def __call__(self, x, experts):
        T, D = x.shape
        y = torch.empty_like(x)
        count_experts[(triton.cdiv(T, 16),)](experts, self.counts, T, BLOCK=16)
        expert_offsets[(1,)](self.counts, self.start, self.E, BLOCK=8)
        scatter_tokens[(T,)](experts, self.start, self.perm)
        gather_tokens[(T,)](x, self.perm, y, D=D)
        return y


torch.manual_seed(0)
router = Router(6, 256)
for step in range(2):
    x = torch.randn(40, 16, device=DEV)
    experts = torch.randint(0, 6, (40,), dtype=torch.int32, device=DEV)
    y = router(x, experts)
    same = torch.equal(y.sum(1).sort().values, x.sum(1).sort().values)
    print(f"step {step}: every token there once: {same}")
    assert same
print("ok")

# /// truth
# title = "counts of the step before are still in the buffer"
# why = "counts is zeroed only when the router is made; from the second step on the old counts are added in, the offsets get too large and the gather finds stale entries and -1 in perm."
# class = "uninitialised read"
# sources = []
# undecided = "Counters that go on from step to step are as often meant; only the program's own expectation, of which torch makes both sides, says that these are not."
# symptom = "step 0 passes, AssertionError in step 1"
# origin_kernel = "count_experts"
# causes = [
#   "uninitialised read",
#   "output not written",
#   "index out of range",
#   "sentinel consumed",
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
# ]
# kernels = ["count_experts"]
# arguments = ["count_ptr"]
# lines = [
#   "tl.atomic_add(count_ptr + e, 1, mask=t < T)",
#   "self.counts = torch.zeros(E, dtype=torch.int32, device=DEV)",
#   "count_experts[(triton.cdiv(T, 16),)](experts, self.counts, T, BLOCK=16)",
# ]
# fix = 'clear|zero'
# never = 'mask'
# options = ["--suspect"]
# fix_old = "        count_experts[(triton.cdiv(T, 16),)]"
# fix_new = "        self.counts.zero_()\n        count_experts[(triton.cdiv(T, 16),)]"
# ///
