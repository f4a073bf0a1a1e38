"""Works on a window of a larger image: row pitch, offset and transposed view handled by strides."""
import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"

@triton.jit
def blur3(x_ptr, y_ptr, H, W, sxh, sxw, syh, syw, BH: tl.constexpr, BW: tl.constexpr):
    h = (tl.program_id(0) * BH + tl.arange(0, BH))[:, None]
    w = (tl.program_id(1) * BW + tl.arange(0, BW))[None, :]
    acc = tl.zeros((BH, BW), dtype=tl.float32)
    for dh in range(-1, 2):
        for dw in range(-1, 2):
            ok = (w + dw >= 0) & (w + dw < W) & (h + dh >= 0) & (h + dh < H)
            acc += tl.load(x_ptr + (h + dh) * sxh + (w + dw) * sxw, mask=ok, other=0.0)
    tl.store(y_ptr + h * syh + w * syw, acc / 9.0, mask=(h < H) & (w < W))


torch.manual_seed(0)
image = torch.randn(40, 64, device=DEV)
canvas = torch.full((40, 64), 7.0, device=DEV)
for view in (lambda t: t[5:25, 10:43], lambda t: t[5:25, 10:43].t(), lambda t: t[::2, 1::3]):
    x, y = view(image), view(canvas)
    H, W = x.shape
    blur3[(triton.cdiv(H, 8), triton.cdiv(W, 16))](x, y, H, W, *x.stride(), *y.stride(), BH=8, BW=16)
    want = torch.nn.functional.avg_pool2d(x[None, None], 3, 1, 1)[0, 0]
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
assert canvas[39, 62] == 7.0 and canvas[1, 0] == 7.0 and canvas[25, 43] == 7.0
print("ok")
