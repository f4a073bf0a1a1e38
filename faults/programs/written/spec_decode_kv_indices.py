"""Build the flat list of KV slots of a batch and sum the values behind it."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def fill_kv_indices(req_to_token, req_ids, lens, indptr, kv_indices, width, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    req = tl.load(req_ids + b)
    n = tl.load(lens + b)
    start = tl.load(indptr + b)
    for i in range(0, tl.cdiv(n, BLOCK)):
        offs = i * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(req_to_token + req * width + offs, mask=offs < n, other=0)
        tl.store(kv_indices + start + offs, slot, mask=offs < n)


@triton.jit
def sum_values(kv_indices, indptr, value, out, D: tl.constexpr):
    b = tl.program_id(0)
    d = tl.arange(0, D)
    acc = tl.zeros((D,), dtype=tl.float32)
    for i in range(tl.load(indptr + b), tl.load(indptr + b + 1)):
        acc += tl.load(value + tl.load(kv_indices + i) * D + d)
    tl.store(out + b * D + d, acc)


class Batch:
    def __init__(self, lens):
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEV)
        self.seq_lens_sum = sum(lens)

    def prepare_for_verify(self, draft):
        self.seq_lens = self.seq_lens + draft


torch.manual_seed(0)
D, width, draft = 8, 64, 4
req_to_token = torch.randperm(256, device=DEV).to(torch.int32).view(4, width)
value = torch.randn(256, D, device=DEV)
batch = Batch([11, 30, 23])
batch.prepare_for_verify(draft)
req_ids = torch.tensor([2, 0, 3], dtype=torch.int32, device=DEV)
indptr = torch.zeros(4, dtype=torch.int32, device=DEV)
indptr[1:] = torch.cumsum(batch.seq_lens, 0)
kv_indices = torch.empty(batch.seq_lens_sum, dtype=torch.int32, device=DEV)
out = torch.empty(3, D, device=DEV)
fill_kv_indices[(3,)](req_to_token, req_ids, batch.seq_lens, indptr, kv_indices, width, BLOCK=16)
sum_values[(3,)](kv_indices, indptr, value, out, D=D)
want = torch.stack([value[req_to_token[r, :n].long()].sum(0)
                    for r, n in zip(req_ids.tolist(), batch.seq_lens.tolist())])
print("max diff", (out - want).abs().max().item())
print("ok")

# /// truth
# title = "kv_indices is sized by a stale total length"
# why = "kv_indices has seq_lens_sum elements as counted before the draft tokens were added, so the fill kernel writes (and the next kernel reads) 12 elements past its end."
# class = "index out of range"
# sources = ["https://github.com/sgl-project/sglang/pull/26750"]
# symptom = "varies from run to run: prints ok, or segmentation fault, or abort (heap corruption)"
# causes = [
#   "index out of range",
#   "sentinel consumed",
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
# ]
# kernels = ["fill_kv_indices"]
# arguments = ["kv_indices"]
# lines = [
#   "tl.store(kv_indices + start + offs, slot, mask=offs < n)",
#   "kv_indices = torch.empty(batch.seq_lens_sum, dtype=torch.int32, device=DEV)",
#   "fill_kv_indices[(3,)](req_to_token, req_ids, batch.seq_lens, indptr, kv_indices, width, BLOCK=16)",
#   "sum_values[(3,)](kv_indices, indptr, value, out, D=D)",
# ]
# fix = 'larger|size|room|indptr|inside|mask'
# never = ''
# options = ["--suspect"]
# fix_old = "torch.empty(batch.seq_lens_sum,"
# fix_new = "torch.empty(int(indptr[-1]),"
# ///
