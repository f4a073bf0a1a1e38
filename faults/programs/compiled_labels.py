"""A loss under torch.compile, where one label is the number of the classes.

With `right` all labels are classes.
"""

import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.compile
def loss_of(logits, labels):
    logs = torch.log_softmax(logits, -1)
    picked = logs.gather(1, labels[:, None])
    return -picked.mean()


def main(right):
    logits = torch.zeros(8, 50, device=DEVICE, requires_grad=True)
    labels = torch.arange(8, device=DEVICE)
    if not right:
        labels[5] = 50
    loss = loss_of(logits, labels)
    loss.backward()
    print("loss", round(loss.item(), 4))


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["triton_", "cpp_"]
# lines = ["logs.gather(1, labels"]
# is_recorded_on_cpu = false
# fix = 'labels inside 0 to 49|index of `picked'
# options = ["--suspect"]
# ///
