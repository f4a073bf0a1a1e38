"""Asks for its GPU in every way there is; prints what it was told as JSON."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN205
import json
import os
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def fill(x_ptr, value, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(x_ptr + offs, value, mask=offs < n)


class Double(torch.autograd.Function):
    """A backward pass sees the same GPU."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        assert gradient.is_cuda
        return torch.full((4,), 2.0, device="cuda")


def train(folder):
    """What a program that trains asks of its GPU; gives which of its streams said they capture."""
    net = torch.nn.Linear(4, 1).to("cuda")
    optimiser, scaler = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cuda")
    rows = torch.utils.data.TensorDataset(torch.randn(4, 4))
    for (batch,) in torch.utils.data.DataLoader(rows, 2, num_workers=1, pin_memory=True):
        x = batch.to("cuda", non_blocking=True)
        loss = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimiser)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimiser)
        scaler.update()
    torch.save(net.state_dict(), f"{folder}/net.pt")
    weight = torch.load(f"{folder}/net.pt", map_location="cuda")["weight"]
    assert weight.is_cuda
    assert weight.equal(net.weight)
    torch.cuda.nvtx.mark("trained")
    accelerator, stream = torch.accelerator, torch.Stream(device="cuda")
    assert accelerator.get_memory_info()[1] == torch.cuda.mem_get_info()[1]
    accelerator.reset_peak_memory_stats()
    with accelerator.device_index(0), stream:
        assert accelerator.current_stream() is torch.cuda.current_stream() is stream
    stream.record_event(torch.Event("cuda")).synchronize()
    graph = torch.cuda.CUDAGraph()
    captures = [accelerator.current_stream().is_capturing()]
    with torch.cuda.graph(graph):
        captures.append(accelerator.current_stream().is_capturing())
        captures.append(torch.cuda.is_current_stream_capturing())
    with accelerator.Graph():
        captures.append(accelerator.current_stream().is_capturing())
    return [*captures, torch.cuda.is_current_stream_capturing()]


def main():
    device = triton.runtime.driver.active.get_active_torch_device()
    properties = torch.cuda.get_device_properties(device)
    target = triton.runtime.driver.active.get_current_target()
    num_programs = triton.runtime.driver.active.utils.get_device_properties(0)[
        "multiprocessor_count"
    ]
    x = torch.empty(5000, device=device)
    torch.set_default_device("cuda")
    generator = torch.Generator(device="cuda").manual_seed(1)
    noise = torch.randn(4, generator=generator, device="cuda")
    with torch.device("cuda:0"), torch.cuda.device(0):
        y = torch.nn.Linear(4, 4).to("cuda").cuda()(noise)
    fill[(num_programs,)](x, 3.0, 5000, BLOCK=16)
    warm = fill.warmup(x, 3.0, 5000, BLOCK=16, grid=(1,))
    warm[(2, 1, 1)](x, 3.0, 5000, 16)
    torch.cuda.synchronize()
    print(triton.testing.do_bench(lambda: fill[(1,)](x, 3.0, 5000, BLOCK=1024)), file=sys.stderr)
    assert torch.arange(4, device=0).to(0).cuda(0).sum() == torch.tensor(6, device="cuda")
    assert x.device == torch.device("cuda:0") != torch.device("cpu")
    original = torch.zeros(2, pin_memory=True)
    original.cuda().add_(1)  # a copy, as on a GPU
    assert original.sum() == 0
    noise.requires_grad_()
    Double.apply(noise).sum().backward()
    torch.set_default_device(None)
    facts = {
        "captures": train(os.path.dirname(sys.argv[1])),
        "gradient": noise.grad.sum().item(),
        "target": [target.backend, target.arch, target.warp_size],
        "processors": [num_programs, properties.multi_processor_count],
        "capability": torch.cuda.get_device_capability(),
        "hip": torch.version.hip is not None,
        "cuda": torch.version.cuda is not None,
        "devices": [str(x.device), str(y.device), x.is_cuda, x.get_device()],
        "sum": x.sum().item(),
        "main": __name__,
        "arguments": sys.argv[1:],
    }
    with open(sys.argv[1], "w") as stream:
        json.dump(facts, stream)


if __name__ == "__main__":
    main()
