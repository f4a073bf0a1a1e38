"""Programs whose numbers become NaN or infinite, each beside a twin that is healthy."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from numbers_seen import judged, seen_natively

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Verdict

torch: Any = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
INF = float("inf")


@pytest.fixture(
    autouse=True, params=["in Python", pytest.param("natively", marks=pytest.mark.tier("sim"))]
)
def seen(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each program is seen both ways, and judged the same."""
    with seen_natively() if request.param == "natively" else contextlib.nullcontext():
        yield


def read(tensor: Any) -> float:
    return float(tensor.float().sum().item())


# -- faulty programs: the comment HERE marks the line of the first such operation ----------------


def half_square() -> None:
    x = torch.full((4,), 300.0).half()
    read((x * x).float() - 1)  # HERE


def half_matmul() -> None:
    a = torch.full((8, 64), 40.0, dtype=torch.float16)
    scores = a @ a.T  # HERE
    read(scores.softmax(-1))


def cast_down() -> None:
    logits = torch.tensor([1.0, 1e6, 2.0])
    small = logits.half()  # HERE
    read(small - small.max())


def exp_too_far() -> None:
    x = torch.tensor([1.0, 95.0])
    e = x.exp()  # HERE
    read(e / e.sum())


def float8() -> None:
    x = torch.tensor([1.0, 1e6])
    y = x.to(torch.float8_e5m2)  # HERE
    read(y)


def bfloat16_product() -> None:
    x = torch.full((2, 2), 3e38, dtype=torch.bfloat16)
    y = x @ x  # HERE
    read(y)


def zero_over_zero() -> None:
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    y = x / x.sum(-1, keepdim=True)  # HERE
    read(y)


def x_over_zero() -> None:
    weights, counts = torch.ones(3), torch.tensor([1.0, 0.0, 2.0])
    mean = weights / counts  # HERE
    read(mean)


def log_of_zero() -> None:
    p = torch.tensor([0.5, 0.0, 0.5])
    entropy = p * p.log()  # HERE
    read(entropy)


def log_of_negative() -> None:
    read(torch.log(torch.tensor([1.0, -0.5])))  # HERE


def root_of_negative() -> None:
    x = torch.tensor([1.0, 1.0, 1.0 + 1e-7])
    variance = x.pow(2).mean() - x.mean().pow(2) - 1e-6
    read(variance.sqrt())  # HERE


def inverse_cosine() -> None:
    read(torch.acos(torch.tensor([1.0000001, 0.5])))  # HERE


def masked_row() -> None:
    scores = torch.zeros(4, 8)
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[2] = True
    scores = scores.masked_fill(mask, -INF)
    weights = scores.softmax(-1)  # HERE
    read(weights @ torch.ones(8, 3))


def masked_row_by_hand() -> None:
    scores = torch.zeros(4, 8)
    scores[1] = -INF
    top = scores.amax(-1, keepdim=True)
    e = (scores - top).exp()  # HERE
    read(e / e.sum(-1, keepdim=True))


def mask_by_product() -> None:
    keep = torch.tensor([1.0, 0.0, 1.0])
    bias = (1 - keep) * -INF  # HERE
    read((torch.zeros(3) + bias).softmax(-1))


def all_ignored() -> None:
    logits = torch.zeros(2, 5, requires_grad=True)
    loss = F.cross_entropy(logits, torch.tensor([-100, -100]))  # HERE
    loss.backward()
    assert not torch.isnan(loss), "loss is NaN"


def mean_of_nothing() -> None:
    x = torch.zeros(4)
    loss = x[x > 1].mean()  # HERE
    assert not math.isnan(loss.item())


def one_sample() -> None:
    read(torch.ones(1, 4).std(0))  # HERE


def double_where() -> None:
    x = torch.tensor([1.0, 0.0], requires_grad=True)
    y = torch.where(x > 0, x.sqrt(), torch.zeros_like(x))  # HERE
    y.sum().backward()
    assert torch.isfinite(x.grad).all()


def norm_of_zero() -> None:
    x = torch.zeros(3, requires_grad=True)
    distance = (x * x).sum().sqrt()  # HERE
    distance.backward()
    assert torch.isfinite(x.grad).all()


def anomaly_mode() -> None:
    with torch.autograd.set_detect_anomaly(True):
        x = torch.zeros(2, requires_grad=True)
        y = (x * 0).sqrt() * 0  # HERE
        y.sum().backward()


def training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(16, 4)
        loss = model(x).square().mean() / (3 - step)  # HERE
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def unscaled_half_loss() -> None:
    x = torch.full((4,), 200.0, dtype=torch.float16, requires_grad=True)
    loss = (x.square()).sum()  # HERE
    loss.backward()
    print(loss)


def uninitialised() -> None:
    buffer = torch.empty(8)
    buffer[:4] = 1.0
    read(buffer * 2)  # HERE


def nan_in_data() -> None:
    import numpy

    data = torch.from_numpy(numpy.array([1.0, numpy.nan], numpy.float32))  # HERE
    x = data * 2
    read(x)


def part_in_place() -> None:
    x = torch.full((4,), 300.0)
    x[1:].div_(torch.zeros(3))  # HERE
    x.add_(1.0)
    read(x)


def beside_in_place() -> None:
    rows = torch.ones(2, 3)
    rows[0].log_()
    rows[0].log_()  # HERE
    rows[1].add_(1.0)
    read(rows)


PROVEN = {
    half_square: "300", half_matmul: "overflow", cast_down: "1e+06", exp_too_far: "overflow",
    float8: "57344", bfloat16_product: "overflow", zero_over_zero: "zero was divided by zero",
    x_over_zero: "a number was divided by zero", log_of_zero: "logarithm of zero",
    log_of_negative: "logarithm of a negative", root_of_negative: "root of a negative",
    inverse_cosine: "outside the domain", masked_row: "masked whole",
    masked_row_by_hand: "masked whole", mask_by_product: "zero times infinity",
    double_where: "zero was divided by zero", norm_of_zero: "a number was divided by zero",
    training: "divided by zero", unscaled_half_loss: "overflow",
    part_in_place: "self[0] = 300", beside_in_place: "logarithm of zero",
}  # fmt: skip
SEEN = {
    all_ignored: "each target is ignored", mean_of_nothing: "mean of no element",
    one_sample: "too few elements",
    uninitialised: "nobody had written",
    nan_in_data: "came in with the data",
}  # fmt: skip


def line_of(program: Callable[[], None]) -> int:
    lines, first = inspect.getsourcelines(program)
    return first + next(n for n, line in enumerate(lines) if "# HERE" in line)


@pytest.mark.parametrize("program", PROVEN, ids=lambda p: p.__name__)
def test_the_first_operation_is_named_with_its_line_and_values(
    program: Callable[[], None],
) -> None:
    claim = judged(program)
    assert claim.root is not None, claim.hypothesis
    root = claim.root
    place = root.culprit.place if root.culprit else f"{root.file}:{root.line}"
    assert place == f"{__file__}:{line_of(program)}", root
    assert PROVEN[program] in root.sentence
    assert root.proof.red != root.proof.green


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("program", SEEN, ids=lambda p: p.__name__)
def test_what_was_not_computed_anew_is_told_and_not_proven(program: Callable[[], None]) -> None:
    claim = judged(program)
    assert claim.root is None
    assert claim.hypothesis.verdict is Verdict.CONFIRMED, claim.hypothesis
    assert f":{line_of(program)} " in claim.hypothesis.evidence[0], claim.hypothesis
    assert SEEN[program] in claim.hypothesis.evidence[0]


# -- healthy programs -----------------------------------------------------------------------------


def half_square_in_range() -> None:
    x = torch.full((4,), 200.0).half()
    read(x * x)


def causal_attention() -> None:
    scores = torch.randn(2, 8, 8)
    mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)
    weights = scores.masked_fill(mask, -INF).softmax(-1)
    read(weights @ torch.randn(2, 8, 4))


def additive_mask() -> None:
    mask = torch.zeros(8, 8)
    mask[:, 5:] = -INF
    q = torch.randn(1, 2, 8, 4)
    read(F.scaled_dot_product_attention(q, q, q, attn_mask=mask))


def full_row_made_zero() -> None:
    scores = torch.full((2, 4), -INF)
    scores[0] = 0.0
    read(scores.softmax(-1).nan_to_num(0.0))


def where_of_untaken() -> None:
    x = torch.tensor([1.0, 0.0])
    read(torch.where(x > 0, 1 / x, torch.zeros_like(x)))


def double_where_done_right() -> None:
    x = torch.tensor([1.0, 0.0], requires_grad=True)
    safe = torch.where(x > 0, x, torch.ones_like(x))
    torch.where(x > 0, safe.sqrt(), torch.zeros_like(x)).sum().backward()
    assert torch.isfinite(x.grad).all()


def log_of_masked_zero() -> None:
    mask = torch.tensor([1.0, 0.0, 1.0])
    read((torch.zeros(3) + mask.log()).softmax(-1))


def scaler_skips() -> None:
    p = nn.Parameter(torch.full((4,), 100.0))
    optimiser = torch.optim.SGD([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(2):
        optimiser.zero_grad()
        loss = (p * p).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimiser)
        norm = torch.nn.utils.clip_grad_norm_([p], 1.0)
        print(norm.item())
        scaler.step(optimiser)
        scaler.update()
    print(p, loss.item())


def skips_such_batches() -> None:
    p = nn.Parameter(torch.ones(3))
    for size in (3, 0):
        loss = (p[:size] * 2).mean()
        if torch.isnan(loss):
            continue
        loss.backward()
    print(p)


def running_minimum() -> None:
    best = torch.tensor(INF)
    for value in (3.0, 2.0):
        best = torch.minimum(best, torch.tensor(value))
    print(best.item())


def infinite_start() -> None:
    print(torch.full((2,), -INF).max().item())


def written_before_read() -> None:
    buffer = torch.empty(8)
    buffer.fill_(2.0)
    read(buffer)


def output_argument() -> None:
    out = torch.empty(4)
    torch.add(torch.ones(4), 1.0, out=out)
    read(out)


def beta_zero() -> None:
    read(torch.addmm(torch.empty(2, 2), torch.ones(2, 3), torch.ones(3, 2), beta=0))


def loss_with_one_target() -> None:
    logits = torch.zeros(2, 5, requires_grad=True)
    loss = F.cross_entropy(logits, torch.tensor([-100, 3]))
    loss.backward()
    assert torch.isfinite(logits.grad).all()


def training_that_goes_well() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = model(torch.randn(16, 4)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    print(loss.item())


def mean_without_nan() -> None:
    x = torch.tensor([1.0, 0.0]) / torch.tensor([1.0, 0.0])
    read(x.nanmean())


def top_k_filter() -> None:
    logits = torch.randn(2, 16)
    least = logits.topk(4, -1).values[:, -1:]
    probabilities = logits.masked_fill(logits < least, -INF).softmax(-1)
    print(torch.multinomial(probabilities, 1).tolist())


HEALTHY = (
    half_square_in_range, causal_attention, additive_mask, full_row_made_zero, where_of_untaken,
    double_where_done_right, log_of_masked_zero, scaler_skips, skips_such_batches, running_minimum,
    infinite_start, written_before_read, output_argument, beta_zero, loss_with_one_target,
    training_that_goes_well, mean_without_nan, top_k_filter,
)  # fmt: skip


@pytest.mark.parametrize("program", HEALTHY, ids=lambda p: p.__name__)
def test_a_healthy_program_is_left_alone(program: Callable[[], None]) -> None:
    claim = judged(program)
    assert claim.root is None
    assert claim.hypothesis.cause is Cause.NONFINITE_VALUE
    assert claim.hypothesis.verdict is Verdict.REFUTED, claim.hypothesis
