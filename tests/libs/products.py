"""Products to compute through cuBLASLt, and what they are in float64."""

import ml_dtypes
import numpy as np

import rtxarr as rx
from rtxarr import _device
from rtxarr.libs import blas

FLOATS = ["float32", "float16", "bfloat16", "float64"]
# Of a result, relative to the sum of the absolute products.
TOLERANCE = {"float32": 3e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2, "float64": 1e-14}
# Of the library's GELU, which is off by 5e-6 in float32, and of its derivative.
GELU_ERROR, GELU_SLOPE_ERROR = 2e-5, 5e-4
SIZES = [1, 2, 3, 7, 8, 16, 33, 64]
FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x, h=1e-5):
    return (gelu(x + h) - gelu(x - h)) / (2 * h)


def host(x):
    x = _device.to_device(x, "cpu") if _device.is_device_array(x) else x
    return np.asarray(x).astype(np.float64)


def check(got, want, scale, epilogue=None, *, slope=False):
    """Compare with float64, within the rounding of sums of that ``scale``."""
    dtype = np.dtype(got.dtype).name
    assert got.shape == want.shape
    error = np.abs(host(got) - want)
    tolerance, least = TOLERANCE[dtype], 1e-5 if "16" in dtype else 1e-30
    if epilogue == "gelu" and _device.is_device_array(got):
        if slope:
            tolerance = max(tolerance, GELU_SLOPE_ERROR)
        else:
            least = max(least, GELU_ERROR)
    bound = tolerance * (scale + np.abs(want)) + least
    assert np.all(error <= bound), f"error {np.nanmax(error / bound)} of what is allowed"


def poison_of(dtype):
    """Give NaN of a dtype; of 8-bit numbers, the bits of one."""
    return np.array(127 if dtype == np.uint8 else np.nan, dtype)


def lay_out(array, values, way):
    """Store matrices in memory in one of several ways, without changing what they are."""
    if values.ndim < 2 or way == "rows":
        return array(values)
    *stack, rows, cols = values.shape
    if way == "columns":
        return array(values.swapaxes(-1, -2).copy()).swapaxes(-1, -2)
    if way == "part of wider rows":
        wide = np.full((*stack, rows, cols + 5), poison_of(values.dtype))
        wide[..., 2 : cols + 2] = values
        return array(wide)[..., 2 : cols + 2]
    if way == "part of longer columns":
        return lay_out(array, values.swapaxes(-1, -2), "part of wider rows").swapaxes(-1, -2)
    if way == "rows outside stacks":
        order = (len(stack), *range(len(stack)), len(stack) + 1)
        return array(values.transpose(order).copy()).transpose(np.argsort(order).tolist())
    if way == "gaps":
        gaps = np.full((*stack, rows, 2 * cols), poison_of(values.dtype))
        gaps[..., ::2] = values
        return array(gaps)[..., ::2]
    return array(values[..., ::-1, :].copy())[..., ::-1, :]


WAYS = [
    "rows", "rows", "columns", "columns", "part of wider rows", "part of longer columns",
    "rows outside stacks", "gaps", "reversed",
]  # fmt: skip


def random_operands(rng, array, dtype):
    """Give two operands, and the same in float64."""
    m, n, k = rng.choice(SIZES, 3)
    stack = [int(x) for x in rng.choice([1, 2, 3, 5], rng.integers(0, 4))]
    if rng.random() < 0.03:
        m = n = 0
    if rng.random() < 0.03:
        k = 0
    found = []
    for shape in ((m, k), (k, n)):
        own = stack[rng.integers(0, len(stack) + 1) :]
        own = [1 if rng.random() < 0.2 else x for x in own]
        values = rng.standard_normal((*own, *shape)).astype(dtype)
        found.append((lay_out(array, values, rng.choice(WAYS)), values.astype(np.float64)))
    (a, a64), (b, b64) = found
    if a64.ndim == 2 and rng.random() < 0.1 and m:
        a, a64 = a[0], a64[0]
    if b64.ndim == 2 and rng.random() < 0.1 and n:
        b, b64 = b[:, 0], b64[:, 0]
    return a, b, a64, b64


EPILOGUES = {None: lambda x: x, "relu": lambda x: np.maximum(x, 0), "gelu": gelu}


def poison(array, shape, dtype):
    return array(np.full(shape, np.nan, dtype))


def poison_results(monkeypatch):
    """Let cuBLASLt write its results over NaN."""
    library = blas._library()
    assert library is not None, blas.status().lines()
    make = library.empty

    def empty(shape, dtype):
        found = make(int(np.prod(shape)), dtype)
        found.view(np.uint8)[...] = 0xFF
        return found.reshape(shape)

    monkeypatch.setattr(library, "empty", empty)


def sweep(array, dtype, epilogue, n_cases, seed=0):
    """Multiply random operands, with poisoned results, and compare."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(rx, dtype))
    for _ in range(n_cases):
        a, b, a64, b64 = random_operands(rng, array, dtype)
        bias = bias64 = None
        if b64.ndim > 1 and rng.random() < 0.5:
            values = rng.standard_normal(b64.shape[-1]).astype(dtype)
            bias, bias64 = array(values), values.astype(np.float64)
        x = a64 @ b64
        scale = np.abs(a64) @ np.abs(b64)
        if bias is not None:
            x, scale = x + bias64, scale + np.abs(bias64)
        out = None
        if x.ndim and rng.random() < 0.5:
            wide = (*x.shape[:-1], x.shape[-1] + int(rng.integers(0, 3)))
            out = poison(array, wide, dtype)[..., : x.shape[-1]]
        got = blas.matmul(a, b, bias=bias, epilogue=epilogue, out=out)
        assert out is None or got is out
        check(got, EPILOGUES[epilogue](x), scale, epilogue)
        assert got.dtype == dtype


def gradient_sweep(array, dtype, n_cases, seed=0):
    """Multiply random operands as tensors, and compare both gradients with float64."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(rx, dtype))
    for _ in range(n_cases):
        *operands, a64, b64 = random_operands(rng, array, dtype)
        values = rng.standard_normal((a64 @ b64).shape).astype(dtype)
        tensors = [rx.Tensor(x, requires_grad=True) for x in operands]
        rx.matmul(*tensors).backward(array(values))
        g64 = values.astype(np.float64)
        if b64.ndim == 1:
            g64 = g64[..., None]
        if a64.ndim == 1:
            g64 = g64[..., None, :]
        for tensor, find in ((tensors[0], _left_gradient), (tensors[1], _right_gradient)):
            want = find(a64, b64, g64)
            check(tensor.grad, want, find(np.abs(a64), np.abs(b64), np.abs(g64)))
            assert tensor.grad.dtype == dtype


def _left_gradient(a, b, g):
    return _summed_to(g @ (b[:, None] if b.ndim == 1 else b).swapaxes(-1, -2), a.shape)


def _right_gradient(a, b, g):
    wide = b[:, None] if b.ndim == 1 else b
    found = (a[None] if a.ndim == 1 else a).swapaxes(-1, -2) @ g
    return _summed_to(found, wide.shape).reshape(b.shape)


def _summed_to(x, shape):
    """Sum over the axes along which an array of ``shape`` was repeated."""
    n_new = x.ndim - len(shape)
    x = x.sum(axis=tuple(range(n_new)))
    return x.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)


def layer_sweep(array, dtype, epilogue, n_cases, seed=0):
    """Run layers of random shapes whose arrays lie in memory in random ways."""
    rng = np.random.default_rng(seed)
    for _ in range(n_cases):
        shape = [int(n) for n in rng.choice(SIZES, 3)]
        layer_case(rng, array, dtype, shape, epilogue, int(rng.choice(SIZES)), WAYS)


def layer_case(rng, array, dtype, shape, epilogue, n_next=24, ways=("rows",)):
    """Run a layer, and what a next one of width ``n_next`` gives back; compare with float64."""
    m, n, k = shape
    dtype = np.dtype(getattr(rx, dtype))
    x64, w64, bias64, g64, v64 = (
        rng.standard_normal(s).astype(dtype).astype(np.float64)
        for s in ((m, k), (n, k), (n,), (m, n_next), (n_next, n))
    )
    x, w, bias, g, v = (
        lay_out(array, values.astype(dtype), rng.choice(ways))
        for values in (x64, w64, bias64, g64, v64)
    )
    out, aux = blas.matmul_with_aux(x, w.T, epilogue=epilogue, bias=bias)
    before = x64 @ w64.T + bias64
    scale = np.abs(x64) @ np.abs(w64.T) + np.abs(bias64)
    check(out, EPILOGUES[epilogue](before), scale, epilogue)
    if epilogue == "gelu":
        check(aux, before, scale)
        slope, gradient = gelu_slope(host(aux)), blas.matmul_dgelu
    else:
        bits = np.unpackbits(host(aux).astype(np.uint8), axis=1, bitorder="little")[:, :n]
        unclear = np.abs(before) <= TOLERANCE[dtype.name] * scale
        assert np.all((bits == (before > 0)) | unclear)
        slope, gradient = bits, blas.matmul_drelu
    want, scale = (g64 @ v64) * slope, np.abs(g64) @ np.abs(v64)
    if epilogue == "gelu":
        scale = scale * 1.2
    check(gradient(g, v, aux), want, scale, epilogue, slope=True)
    got, sums = gradient(g, v, aux, bias_grad=True)
    check(got, want, scale, epilogue, slope=True)
    check(sums, want.sum(axis=0), scale.sum(axis=0), epilogue, slope=True)
    got, sums = blas.matmul_bias_grad(out.T, x)
    check(got, host(out).T @ x64, np.abs(host(out)).T @ np.abs(x64))
    check(sums, host(out).sum(axis=0), np.abs(host(out)).sum(axis=0))


def relu_case(array, dtype):
    """Look at the ReLU of NaN, and at the gradient that it lets through around zero."""
    dtype = np.dtype(getattr(rx, dtype))
    values = np.zeros((5, 8), dtype)
    values[:, 0] = np.nan, 1, -1, 0, 2
    a, eye = array(values), array(np.eye(8, dtype=dtype))
    want = np.array([np.nan, 1, 0, 0, 2])
    out, aux = blas.matmul_with_aux(a, eye, epilogue="relu")
    for found in (out, blas.matmul(a, eye, epilogue="relu")):
        np.testing.assert_array_equal(host(found)[:, 0], want)
    gradient = blas.matmul_drelu(array(np.ones((5, 8), dtype)), eye, aux)
    np.testing.assert_array_equal(host(gradient)[1:, 0], [1, 0, 1, 1])


LAYERS = [(16, 8, 32), (33, 65, 17), (5, 1, 3), (2, 130, 8), (64, 256, 128), (1, 24, 16)]


def fp8_case(
    rng, array, shape, formats, by_row, dtype, biased, contiguous=True, epilogue=None, fast=False
):
    m, n, k = shape
    a8, b8 = (
        rng.standard_normal(s).astype(np.float32).astype(FP8[name])
        for s, name in zip(((m, k), (n, k)), formats, strict=True)
    )
    shapes = ((m, 1), (1, n)) if by_row else ((), (1,))
    scales = [rng.uniform(0.5, 2, s).astype(np.float32) for s in shapes]
    dtype = np.dtype(getattr(rx, dtype))
    bias = rng.standard_normal(n).astype(dtype) if biased else None
    a64 = a8.astype(np.float64) * scales[0]
    b64 = b8.T.astype(np.float64) * scales[1]
    b = array(b8.view(np.uint8)).T if contiguous else array(b8.view(np.uint8).T.copy())
    got = blas.matmul_fp8(
        array(a8.view(np.uint8)), b, formats=formats, scale_a=array(scales[0]),
        scale_b=array(scales[1]), dtype=dtype, bias=None if bias is None else array(bias),
        epilogue=epilogue, fast=fast,
    )  # fmt: skip
    check_fp8(got, a64, b64, bias, epilogue, dtype)


def check_fp8(got, a64, b64, bias, epilogue, dtype):
    want = EPILOGUES[epilogue](a64 @ b64 + (0 if bias is None else bias.astype(np.float64)))
    # The tensor cores add fp8 products with some 14 bits, aligned to the largest of them, before
    # the sum goes on in float32: much coarser than what float32 alone would give.
    scale = np.abs(a64) @ np.abs(b64)
    error = np.abs(host(got) - want)
    assert got.shape == want.shape and got.dtype == dtype
    assert np.all(error <= 1e-3 * scale + TOLERANCE[dtype.name] * np.abs(want) + 1e-5)


# Of a stack of each operand; the library multiplies the last in one launch for each pair.
FP8_STACKS = [
    ((2,), ()), ((3, 2), (1,)), ((), (2,)), ((2,), (2,)), ((3, 2), (3, 2)), ((3, 1), (2,)),
    ((1,), ()), ((2, 2), (2,)), ((5, 4, 2), (5, 4, 2)),
]  # fmt: skip


def fp8_stack_case(rng, array, stacks, by_row, dtype, shape=(8, 32, 48), epilogue=None):
    """Multiply stacks that lie in one of several ways, with a scale for all or for each row."""
    m, n, k = shape
    dtype = np.dtype(getattr(rx, dtype))
    operands, wide, scales = [], [], []
    for stack, (rows, cols), way, own in zip(
        stacks,
        ((m, k), (n, k)),
        rng.choice(["rows", "part of wider rows", "rows outside stacks", "gaps", "reversed"], 2),
        ((m, 1), (1, n)),
        strict=True,
    ):
        values = rng.standard_normal((*stack, rows, cols)).astype(np.float32).astype(FP8["e4m3"])
        operands.append(lay_out(array, values.view(np.uint8), way))
        lead = stack if rng.random() < 0.7 else ()
        scale = rng.uniform(0.5, 2, (*lead, *own) if by_row else ()).astype(np.float32)
        scales.append(array(scale))
        if own[0] == 1:  # of columns
            operands[-1], values = operands[-1].swapaxes(-1, -2), values.swapaxes(-1, -2)
        wide.append(values.astype(np.float64) * scale)
    bias = rng.standard_normal(n).astype(dtype) if dtype != np.float32 else None
    got = blas.matmul_fp8(
        *operands, scale_a=scales[0], scale_b=scales[1], dtype=dtype, epilogue=epilogue,
        bias=None if bias is None else array(bias),
    )  # fmt: skip
    check_fp8(got, *wide, bias, epilogue, dtype)


def fp8_sweep(array, n_cases, seed=0):
    """Multiply random 8-bit matrices with options drawn at random; yield what was drawn."""
    rng = np.random.default_rng(seed)
    for _ in range(n_cases):
        m, n, k = (int(x) for x in rng.choice([16, 32, 48, 80, 128, 256], 3))
        if rng.random() < 0.2:
            n, k = (max(x + int(rng.integers(-1, 2)), 1) for x in (n, k))
        m = max(m + int(rng.integers(-15, 2)), 1)
        formats = [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")][rng.integers(3)]
        dtype = np.dtype(getattr(rx, rng.choice(["bfloat16", "float16", "float32"])))
        by_row, fast = bool(rng.random() < 0.4), bool(rng.random() < 0.3)
        operands, wide, scales = [], [], []
        for shape, kind, own in (((m, k), 0, (m, 1)), ((n, k), 1, (1, n))):
            values = rng.standard_normal(shape).astype(np.float32).astype(FP8[formats[kind]])
            operands.append(lay_out(array, values.view(np.uint8), rng.choice(WAYS)))
            scale = rng.uniform(0.5, 2, own if by_row else [(), (1,)][rng.integers(2)])
            scale = scale.astype(np.float32) if by_row or rng.random() < 0.8 else None
            scales.append(scale)
            wide.append(values.astype(np.float64))
        biased = dtype != np.float32 and rng.random() < 0.5
        bias = rng.standard_normal(n).astype(dtype) if biased else None
        options = {"epilogue": [None, "relu", "gelu"][rng.integers(3)], "fast": fast}
        given = (x if x is None else array(x) for x in (*scales, bias))
        names = ("scale_a", "scale_b", "bias")
        got = blas.matmul_fp8(
            operands[0], operands[1].T, formats=formats, dtype=dtype, **options,
            **dict(zip(names, given, strict=True)),
        )  # fmt: skip
        a64, b64 = (
            x if scale is None else x * scale
            for x, scale in zip((wide[0], wide[1].T), scales, strict=True)
        )
        check_fp8(got, a64, b64, bias, options["epilogue"], dtype)
        yield {"n": n, "k": k, "formats": formats, "by_row": by_row, "fast": fast, "dtype": dtype}
