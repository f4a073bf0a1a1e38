"""A softmax of rows of which one has no key: all of it is masked, and the loss is NaN."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import torch
import triton
import triton.language as tl


@triton.jit
def masked_softmax(scores_ptr, lengths_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + row)
    scores = tl.load(scores_ptr + row * n + at, mask=at < n, other=float("-inf"))
    scores = tl.where(at < length, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=0))
    tl.store(out_ptr + row * n + at, weights / tl.sum(weights, axis=0), mask=at < n)


def main():
    scores, lengths = torch.ones(4, 10), torch.full((4,), 7, dtype=torch.int32)
    lengths[2] = 0
    weights = torch.empty_like(scores)
    masked_softmax[(4,)](scores, lengths, weights, 10, BLOCK=16)
    loss = (weights @ torch.ones(10, 3)).square().mean()
    assert not torch.isnan(loss), "the loss is NaN"


main()
