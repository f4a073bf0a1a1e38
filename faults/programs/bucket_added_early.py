"""Gradients are reduced on a stream of their own, and the optimizer's step does not wait for it.

With `right` it does, as DistributedDataParallel has it.
"""

import sys

import torch


def main(right):
    layers = [torch.nn.Linear(128, 128).cuda() for _ in range(3)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    x = torch.randn(32, 128, device="cuda")
    reducing = torch.cuda.Stream()
    for _ in range(2):
        y = x
        for layer in layers:
            y = layer(y).relu()
        y.sum().backward()
        for parameter in reversed(parameters):
            reducing.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(reducing):
                parameter.grad.mul_(0.5)
        if right:
            torch.cuda.current_stream().wait_stream(reducing)
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(parameter.grad, alpha=0.1)
        torch.cuda.synchronize()
        for parameter in parameters:
            parameter.grad = None
    print("sum", sum(parameter.sum().item() for parameter in parameters))


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing wait between streams"]
# lines = ["parameter.sub_("]
# fix = 'wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
