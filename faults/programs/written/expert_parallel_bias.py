"""Expert parallel MoE: route, map global experts to this rank's, add the experts' biases."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def route_top2(p_ptr, id_ptr, w_ptr, E, min_prob, BLOCK: tl.constexpr):
    tok = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    p = tl.load(p_ptr + tok * E + e, mask=e < E, other=-1.0)
    for k in range(2):
        best = tl.argmax(p, axis=0)
        prob = tl.max(p, axis=0)
        # -1: the slot is not used, the router is not sure enough
        tl.store(id_ptr + tok * 2 + k, tl.where(prob < min_prob, -1, best))
        tl.store(w_ptr + tok * 2 + k, prob)
        p = tl.where(e == best, -1.0, p)


@triton.jit
def to_local(id_ptr, map_ptr, local_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = offs < n
    gid = tl.load(id_ptr + offs, mask=keep, other=-1)
    local = tl.load(map_ptr + gid, mask=keep, other=-1)
    tl.store(local_ptr + offs, local, mask=keep)


@triton.jit
def add_bias(local_ptr, w_ptr, bias_ptr, out_ptr, D: tl.constexpr):
    tok = tl.program_id(0)
    d = tl.arange(0, D)
    acc = tl.zeros((D,), dtype=tl.float32)
    for k in range(2):
        e = tl.load(local_ptr + tok * 2 + k)
        if e >= 0:
            acc += tl.load(bias_ptr + e * D + d) * tl.load(w_ptr + tok * 2 + k)
    tl.store(out_ptr + tok * D + d, acc)


torch.manual_seed(0)
T, E, D, world, rank = 24, 7, 16, 2, 1
maps = torch.full((world, E), -1, dtype=torch.int32, device=DEV)
for g in range(E):
    maps[g % world, g] = g // world          # experts are dealt out in turn
bias = torch.randn(int(maps[rank].max()) + 1, D, device=DEV)
probs = torch.softmax(torch.randn(T, E, device=DEV) * 2, -1)
ids = torch.empty(T, 2, dtype=torch.int32, device=DEV)
w, out = torch.empty(T, 2, device=DEV), torch.empty(T, D, device=DEV)
local = torch.empty_like(ids)
route_top2[(T,)](probs, ids, w, E, 0.2, BLOCK=8)
to_local[(1,)](ids, maps[rank], local, ids.numel(), BLOCK=64)
add_bias[(T,)](local, w, bias, out, D=D)

want = torch.zeros(T, D, device=DEV)
for t in range(T):
    for p, g in zip(*[x.tolist() for x in probs[t].topk(2)]):
        if p >= 0.2 and maps[rank, g] >= 0:
            want[t] += p * bias[maps[rank, g]]
print("tokens that differ:", int(((out - want).abs().amax(1) > 1e-4).sum()), "of", T)
assert torch.allclose(out, want, atol=1e-4)
print("ok")

# /// truth
# title = "unused slots (-1) index the expert map at -1"
# why = "route_top2 writes -1 for unused slots and to_local uses it as an index, reading the element before this rank's map (another rank's local id), which then selects a bias row that this rank does not have."
# class = "index out of range"
# sources = [
#   "https://github.com/vllm-project/vllm/pull/46408",
#   "https://github.com/ROCm/aiter/issues/4636",
# ]
# symptom = "prints the number of tokens that differ, AssertionError"
# origin_kernel = "route_top2"
# causes = [
#   "index out of range",
#   "sentinel consumed",
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
# ]
# kernels = ["to_local"]
# arguments = ["map_ptr", "id_ptr"]
# lines = [
#   "local = tl.load(map_ptr + gid, mask=keep, other=-1)",
#   "to_local[(1,)](ids, maps[rank], local, ids.numel(), BLOCK=64)",
#   "add_bias[(T,)](local, w, bias, out, D=D)",
# ]
# fix = '>= 0|mask|-1|inside|range'
# never = 'larger'
# options = ["--suspect"]
# fix_old = "local = tl.load(map_ptr + gid, mask=keep, other=-1)"
# fix_new = "local = tl.load(map_ptr + gid, mask=keep & (gid >= 0), other=-1)"
# ///
