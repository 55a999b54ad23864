"""Fused functions on a CPU, against NumPy one operation at a time, numexpr and numba.

Contestants take turns in each round, in one process and on as many threads. Figures are medians
over rounds, with quartiles, and how long processors were busy, which other processes change less.
Results are compared before. "best case" is what a copy of the arrays that must be read and written
would take. numexpr does reductions only at the end of an expression, so that NumPy does them in
between where that is faster; numba runs loops over rows, written by hand, in parallel.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np

import rtxarr as rx
from rtxarr.polygraph import fuse

ROWS, COLS = 4096, 1024


# ------------------------------------------------------------------------- one at a time, fused


def chain(x, a, b):
    return np.tanh(a * x + b) * (1 / (1 + np.exp(-x))) + x * 0.5


def arithmetic(x, a, b):
    y = (x * a + b) * x - x
    return np.maximum(y, 0.1) * a + b * (x - a) + x


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def layer_norm(x, weight, bias):
    d = x - x.mean(axis=-1, keepdims=True)
    variance = (d * d).mean(axis=-1, keepdims=True)
    return d / np.sqrt(variance + 1e-5) * weight + bias


def group_norm_silu(x, weight, bias):
    n, channels, height, width = x.shape
    y = x.reshape(n, 32, -1)
    d = y - y.mean(axis=-1, keepdims=True)
    variance = (d * d).mean(axis=-1, keepdims=True)
    y = (d / np.sqrt(variance + 1e-5)).reshape(x.shape)
    y = y * weight[:, None, None] + bias[:, None, None]
    return y * (1 / (1 + np.exp(-y)))


def adam(p, g, m, v, rate):
    m *= 0.9
    m += 0.1 * g
    v *= 0.999
    v += 0.001 * g * g
    p -= rate * m / (np.sqrt(v) + 1e-8)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def sum_of_squares(x):
    return (x * x).sum()


# ------------------------------------------------------------------------------------- numexpr


def by_numexpr():
    import numexpr

    numexpr.set_num_threads(n_threads())

    def run(expression, out=None, **names):
        return numexpr.evaluate(expression, names, out=out)

    def numbers(x, *values):  # Python floats would make it float64
        return map(x.dtype.type, values)

    def ne_chain(x, a, b):
        a, b, half, one = numbers(x, a, b, 0.5, 1)
        text = "tanh(a * x + b) * (one / (one + exp(-x))) + x * half"
        return run(text, x=x, a=a, b=b, half=half, one=one)

    def ne_arithmetic(x, a, b):
        a, b, least = numbers(x, a, b, 0.1)
        y = "((x * a + b) * x - x)"
        text = f"where({y} > least, {y}, least) * a + b * (x - a) + x"
        return run(text, x=x, a=a, b=b, least=least)

    def ne_softmax(x):
        e = run("exp(x - top)", x=x, top=x.max(axis=-1, keepdims=True))
        return run("e / total", out=e, e=e, total=e.sum(axis=-1, keepdims=True))

    def deviation(x, mean):
        (eps,) = numbers(x, 1e-5)
        variance = run("(x - mean) ** 2", x=x, mean=mean).mean(axis=-1, keepdims=True)
        return np.sqrt(variance + eps)

    def ne_layer_norm(x, weight, bias):
        mean = x.mean(axis=-1, keepdims=True)
        text = "(x - mean) / deviation * weight + bias"
        return run(text, x=x, mean=mean, deviation=deviation(x, mean), weight=weight, bias=bias)

    def ne_group_norm_silu(x, weight, bias):
        y = x.reshape(x.shape[0], 32, -1)
        mean = y.mean(axis=-1, keepdims=True)
        y = run("(y - mean) / deviation", y=y, mean=mean, deviation=deviation(y, mean))
        y, weight, bias = y.reshape(x.shape), weight[:, None, None], bias[:, None, None]
        y = run("y * weight + bias", out=y, y=y, weight=weight, bias=bias)
        (one,) = numbers(x, 1)
        return run("y * (one / (one + exp(-y)))", out=y, y=y, one=one)

    def ne_adam(p, g, m, v, rate):
        rate, b1, c1, b2, c2, eps = numbers(p, rate, 0.9, 0.1, 0.999, 0.001, 1e-8)
        run("m * b1 + c1 * g", out=m, m=m, g=g, b1=b1, c1=c1)
        run("v * b2 + c2 * g * g", out=v, v=v, g=g, b2=b2, c2=c2)
        run("p - rate * m / (sqrt(v) + eps)", out=p, p=p, m=m, v=v, rate=rate, eps=eps)

    def ne_gelu(x):
        half, one, a, b = numbers(x, 0.5, 1, 0.7978845608, 0.044715)
        text = "half * x * (one + tanh(a * (x + b * x * x * x)))"
        return run(text, x=x, half=half, one=one, a=a, b=b)

    def ne_sum_of_squares(x):
        return run("sum(x * x)", x=x)

    return [
        ne_chain,
        ne_arithmetic,
        ne_softmax,
        ne_layer_norm,
        ne_group_norm_silu,
        ne_adam,
        ne_gelu,
        ne_sum_of_squares,
    ]


# --------------------------------------------------------------------------------------- numba


def by_numba():
    import numba

    numba.set_num_threads(n_threads())
    compiled = functools.partial(numba.njit, parallel=True, error_model="numpy")
    prange, exp, tanh, sqrt = numba.prange, np.exp, np.tanh, np.sqrt

    @compiled
    def nb_chain(x, a, b):
        a, b, half, one = x.dtype.type(a), x.dtype.type(b), x.dtype.type(0.5), x.dtype.type(1)
        out, y = np.empty_like(x), x.reshape(-1)
        o = out.reshape(-1)
        for i in prange(y.size):
            o[i] = tanh(a * y[i] + b) * (one / (one + exp(-y[i]))) + y[i] * half
        return out

    @compiled
    def nb_arithmetic(x, a, b):
        a, b, c = x.dtype.type(a), x.dtype.type(b), x.dtype.type(0.1)
        out, flat = np.empty_like(x), x.reshape(-1)
        o = out.reshape(-1)
        for i in prange(flat.size):
            z = flat[i]
            y = (z * a + b) * z - z
            o[i] = max(y, c) * a + b * (z - a) + z
        return out

    @compiled
    def nb_softmax(x):
        out = np.empty_like(x)
        for r in prange(x.shape[0]):
            top = x[r].max()
            total = x.dtype.type(0)
            for c in range(x.shape[1]):
                e = exp(x[r, c] - top)
                out[r, c] = e
                total += e
            for c in range(x.shape[1]):
                out[r, c] /= total
        return out

    @compiled
    def nb_layer_norm(x, weight, bias):
        out, n, eps = np.empty_like(x), x.dtype.type(x.shape[1]), x.dtype.type(1e-5)
        for r in prange(x.shape[0]):
            total = square = x.dtype.type(0)
            for c in range(x.shape[1]):
                total += x[r, c]
            mean = total / n
            for c in range(x.shape[1]):
                square += (x[r, c] - mean) * (x[r, c] - mean)
            deviation = sqrt(square / n + eps)
            for c in range(x.shape[1]):
                out[r, c] = (x[r, c] - mean) / deviation * weight[c] + bias[c]
        return out

    @compiled
    def nb_group_norm_silu(x, weight, bias):
        n, channels, height, width = x.shape
        one, eps = x.dtype.type(1), x.dtype.type(1e-5)
        y = x.reshape(n * 32, -1)
        out = np.empty_like(x)
        o = out.reshape(n * 32, -1)
        per_channel, per_group = height * width, channels // 32
        size = x.dtype.type(y.shape[1])
        for r in prange(y.shape[0]):
            total = square = x.dtype.type(0)
            for c in range(y.shape[1]):
                total += y[r, c]
            mean = total / size
            for c in range(y.shape[1]):
                square += (y[r, c] - mean) * (y[r, c] - mean)
            deviation = sqrt(square / size + eps)
            first = r % 32 * per_group
            for c in range(y.shape[1]):
                k = first + c // per_channel
                z = (y[r, c] - mean) / deviation * weight[k] + bias[k]
                o[r, c] = z * (one / (one + exp(-z)))
        return out

    @compiled
    def nb_adam(p, g, m, v, rate):
        kind = p.dtype.type
        rate, b1, c1, b2, c2 = kind(rate), kind(0.9), kind(0.1), kind(0.999), kind(0.001)
        eps = kind(1e-8)
        for i in prange(p.size):
            m[i] = m[i] * b1 + c1 * g[i]
            v[i] = v[i] * b2 + c2 * g[i] * g[i]
            p[i] -= rate * m[i] / (sqrt(v[i]) + eps)

    @compiled
    def nb_gelu(x):
        kind = x.dtype.type
        half, one, a, b = kind(0.5), kind(1), kind(0.7978845608), kind(0.044715)
        out, y = np.empty_like(x), x.reshape(-1)
        o = out.reshape(-1)
        for i in prange(y.size):
            o[i] = half * y[i] * (one + tanh(a * (y[i] + b * y[i] * y[i] * y[i])))
        return out

    @compiled
    def nb_sum_of_squares(x):
        total, y = x.dtype.type(0), x.reshape(-1)
        for i in prange(y.size):
            total += y[i] * y[i]
        return total

    return [
        nb_chain,
        nb_arithmetic,
        nb_softmax,
        nb_layer_norm,
        nb_group_norm_silu,
        nb_adam,
        nb_gelu,
        nb_sum_of_squares,
    ]


# ------------------------------------------------------------------------------------- running

PLAIN = [chain, arithmetic, softmax, layer_norm, group_norm_silu, adam, gelu, sum_of_squares]


def n_threads():
    return int(os.environ.get("RTXARR_NUM_THREADS") or len(os.sched_getaffinity(0)))


def cases(dtype):
    """Give, for each case, its title, number in PLAIN, arguments, and passes over its array."""
    rng = np.random.default_rng(0)

    def make(*shape):
        return rng.standard_normal(shape, dtype=dtype)

    square, image = make(ROWS, COLS), make(4, 320, 64, 64)
    row, channels = make(COLS), make(320)
    flat = [make(ROWS * COLS) for _ in range(4)]
    flat[3] = np.abs(flat[3])
    yield "chain of 10, 4096", 0, (make(4096), 2.0, 0.3), 2
    yield "arithmetic of 10, 4096", 1, (make(4096), 2.0, 0.3), 2
    yield f"chain of 10, {ROWS} x {COLS}", 0, (square, 2.0, 0.3), 2
    yield f"arithmetic of 10, {ROWS} x {COLS}", 1, (square, 2.0, 0.3), 2
    yield f"softmax, {ROWS} x {COLS}", 2, (square,), 2
    yield f"layer norm, {ROWS} x {COLS}", 3, (square, row, row), 2
    yield "GroupNorm + SiLU, 4 x 320 x 64 x 64", 4, (image, channels, channels), 2
    yield f"Adam, {ROWS * COLS}", 5, (*flat, 1e-6), 7
    yield f"GELU, {ROWS} x {COLS}", 6, (square,), 2
    yield f"sum of squares, {ROWS} x {COLS}", 7, (square,), 1


def contestants():
    found = {"NumPy": PLAIN, "rtxarr": [fuse(f) for f in PLAIN]}
    found["rtxarr fast"] = [fuse(f, mode="fast") for f in PLAIN]
    for name, make in (("numexpr", by_numexpr), ("numba", by_numba)):
        try:
            found[name] = make()
        except ImportError:
            print(f"{name} is not installed")
    return found


def copied(arguments):
    return [x.copy() if isinstance(x, np.ndarray) else x for x in arguments]


def check(functions, arguments):
    """Compare with NumPy, by results and by what was changed."""
    wants = None
    for name, function in functions.items():
        given = copied(arguments)
        got = [function(*given), *given]
        wants = got if wants is None else wants
        for a, b in zip(got, wants, strict=True):
            if b is not None:
                tolerance = 2e-4 if np.asarray(b).dtype == np.float32 else 1e-9
                # numexpr and numba add up from first to last.
                rtol = 1e-2 if name in ("numexpr", "numba") and not np.ndim(b) else tolerance
                np.testing.assert_allclose(a, b, rtol=rtol, atol=tolerance, err_msg=name)


def measure(functions, arguments, rounds):
    own = {name: copied(arguments) for name in functions}
    size = max(x.size for x in arguments if isinstance(x, np.ndarray))
    calls = max(2, 1_000_000 // size)
    rounds *= 1 if size > 100_000 else 10
    times = {name: [] for name in functions}
    busy = {name: [] for name in functions}
    for _ in range(rounds + 2):
        for name, function in functions.items():
            function(*own[name])  # memory and caches are as this one leaves them
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                function(*own[name])
            times[name].append((time.perf_counter() - start) / calls)
            busy[name].append((time.process_time() - cpu) / calls)
    return ({name: values[2:] for name, values in kind.items()} for kind in (times, busy))


def copy_rate():
    source = np.ones(2**25, np.float32)
    target = np.empty_like(source)
    half = len(source) // 2
    from concurrent.futures import ThreadPoolExecutor

    parts = [(target[:half], source[:half]), (target[half:], source[half:])]
    with ThreadPoolExecutor(2) as pool:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            list(pool.map(lambda p: np.copyto(*p), parts))
            times.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument("--only", help="cases whose title has this word")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    versions = {"python": sys.version.split()[0], "numpy": np.__version__}
    for name in ("numexpr", "numba", "llvmlite"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    rate = copy_rate()
    report = {"versions": versions, "threads": n_threads(), "copy_bytes_per_s": rate, "cases": []}
    print(
        versions,
        f"{n_threads()} threads; a copy moves {rate / 1e9:.0f} GB/s; rtxarr",
        rx.__version__,
    )
    everybody = contestants()
    for dtype in map(np.dtype, options.dtypes):
        for title, k, arguments, passes in cases(dtype):
            if options.only and options.only not in title:
                continue
            functions = {name: found[k] for name, found in everybody.items()}
            check(functions, arguments)
            times, busy = measure(functions, arguments, options.rounds)
            moved = arguments[0].nbytes * passes
            report["cases"].append(show(title, dtype, times, busy, moved, rate))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


def show(title, dtype, times, busy, n_bytes, rate):
    case = {"case": title, "dtype": dtype.name, "best_case_s": n_bytes / rate}
    plain = statistics.median(times["NumPy"])
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        cpu = statistics.median(busy[name])
        case[name] = {"median_s": middle, "quartiles_s": [low, high], "cpu_s": cpu}
        print(
            f"{dtype.name:8} {title:36} {name:12} {middle * 1e6:9.1f} us"
            f" ({low * 1e6:.1f} - {high * 1e6:.1f}) {plain / middle:6.2f}x"
            f" {n_bytes / middle / 1e9:6.1f} GB/s  processors busy {cpu * 1e6:9.1f} us",
            flush=True,
        )
    return case


if __name__ == "__main__":
    main()
