"""Kernels that are wrong in one place each, made by editing generated text.

A fault is (kernel, what is wrong, pattern, replacement); patterns are regular expressions of which
the first match is replaced, or the number given as a fifth part. ``planted`` makes the texts.
"""

# ruff: noqa: E501  (a table)

import re

import numpy as np


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def norm(x):
    wide = x.astype(np.float32)
    apart = wide - wide.mean(axis=-1, keepdims=True)
    scale = np.sqrt((apart * apart).mean(axis=-1, keepdims=True) + np.float32(1e-5))
    return (apart / scale).astype(x.dtype), x.max(axis=-1)


def chain(x, y):
    return np.maximum(x * y + 1, 0) - np.concatenate([x[:, 1:], y[:, :1]], axis=1)


def argmax(x):
    return np.argmax(x, axis=-1), np.sum(x * x, axis=-1)


def kernels():
    """Return, by name, the functions whose kernels are spoilt, and arguments."""
    rng = np.random.default_rng(0)

    def some(shape, dtype):
        return rng.standard_normal(shape).astype(dtype)

    return {
        "softmax": (softmax, (some((3, 1100), "float32"),)),
        "norm": (norm, (some((13, 300), "float16"),)),
        "kept": (softmax, (some((3, 1100), "float32"),)),  # in shared memory, as longer rows are
        "kept norm": (norm, (some((13, 300), "float16"),)),
        "chain": (chain, (some((9, 77), "float32"), some((9, 77), "float32"))),
        "argmax": (argmax, (some((2, 701), "float64"),)),
    }


_TILE = r"kept0 \+ tile \+ \(j \* threads \+ thread\) \* 4"

FAULTS = [
    # --------------------------------------------------------------------------- off by one
    ("softmax", "skips a warp's maximum", r"lane < warps", "lane != 1 && lane < warps"),
    ("softmax", "skips a warp's sum", r"lane < warps", "lane && lane < warps", 1),
    ("softmax", "stops a warp early", r"lane < warps", "lane < warps - 1", 1),
    ("softmax", "forgets the last lane step", r"apart; apart /= 2", "apart > 1; apart /= 2", 1),
    ("softmax", "begins lanes too low", r"32\) / 2; apart", "32) / 4; apart", 1),
    ("softmax", "sums what is not there", r"if \(valid\) a1_sum", "a1_sum"),
    ("softmax", "leaves the last one out of the sum", r"c < (cols|end);", r"c < \1 - 1;", 1),
    ("softmax", "leaves the last one out of the maximum", r"c < (cols|end);", r"c < \1 - 1;"),
    ("softmax", "stores one place on", r"store_packet<4>\(out0 \+ \(", "store_packet<4>(out0 + (1 + "),
    ("softmax", "does not store the last one", r"if \(c < (cols|end)\) \{", r"if (c < \1 - 1) {"),
    ("softmax", "does not store the last packet", r"if \(first < (cols|end)\) store", r"if (first < \1 - 4) store"),
    ("softmax", "stores a packet past the end", r"if \(first < (cols|end)\) store", r"if (first < \1 + 4) store"),
    ("softmax", "loads one place on", r"load_packet\w*<4>\(.*v0_at\[j\], in0 \+ \(", r"\g<0>1 + "),
    ("softmax", "leaves out the last packet", r"valid = first < (cols|end);", r"valid = first < \1 - 4;"),
    ("softmax", "takes a tile for its first part", r"tile \+ j \* threads \* 4", "tile + j * threads"),
    ("norm", "runs one row too many", r"row < rows;", "row <= rows;"),
    ("norm", "divides by the next row's length", r"a1 / v4", "a1 / (v4 + 1)"),
    ("norm", "stores rows one place on", r"out0\[r\]", "out0[r + 1]"),
    ("norm", "forgets the last lane step", r"apart; apart /= 2", "apart > 1; apart /= 2"),
    ("norm", "reads the row before", r"in0\[r \* n0", "in0[(r ? r - 1 : r) * n0"),
    ("norm", "leaves out the last of a row", r"if \(c < (cols|end)\) \{", r"if (c < \1 - 1) {"),
    ("chain", "takes the seam one too late", r"rest\(i, d0\) < n0", "rest(i, d0) <= n0"),
    ("chain", "takes the other side one too late", r"rest\(i, d0\) >= n0", "rest(i, d0) > n0"),
    ("chain", "shifts by two", r"in0\[i \+ 1\]", "in0[i + 2 < cols ? i + 2 : i]"),
    ("chain", "stores past the end", r"if \(i < (cols|end)\) \{", r"if (i <= \1) {"),
    ("chain", "stores a packet past the end", r"out0_at\[j\], (cols|end) - first", r"\g<0> + 1"),
    ("chain", "does not store the last", r"if \(i < (cols|end)\) \{", r"if (i < \1 - 1) {"),
    ("chain", "skips the last packet", r"out0_at\[j\], (cols|end) - first", r"\g<0> - 1"),
    ("argmax", "counts from one", r"\{v0, c\}", "{v0, c + 1}"),
    ("argmax", "stores one row on", r"out1\[r\]", "out1[r + 1]"),
    ("argmax", "stops a warp early", r"lane < warps", "lane < warps - 1"),
    ("argmax", "leaves the last one out", r"c < (cols|end);", r"c < \1 - 1;"),
    # --------------------------------------------------------- missing barriers and races
    ("softmax", "no barrier before the maxima are read", r"BARRIER\(\);", ""),
    ("softmax", "no barrier before the sums are read", r"BARRIER\(\);", "", 1),
    ("softmax", "one warp alone comes to the barrier", r"BARRIER\(\);", "if (thread < 32) BARRIER();"),
    ("argmax", "no barrier", r"BARRIER\(\);", ""),
    ("softmax", "sums lie where maxima are still read", r"shared_memory \+ 512", "shared_memory + 0"),
    ("kept", "the row lies where maxima are", r"shared_memory \+ 1024", "shared_memory + 0"),
    ("kept", "reads what other threads keep", rf"kept_packet<4>\(v0_at\[j\], {_TILE}", "kept_packet<4>(v0_at[j], kept0 + tile + (j * threads + threads - 1 - thread) * 4"),
    ("kept", "keeps both packets in one place", rf"keep_packet<4>\({_TILE}", "keep_packet<4>(kept0 + tile + thread * 4"),
    ("kept", "does not keep the exponentials", rf"keep_packet<4>\({_TILE}, v3_at\[j\]\);", ""),
    ("softmax", "every second warp does not write", r"thread % 32 == 0", "thread % 64 == 0"),
    ("argmax", "partial results of both in one place", r"shared_memory \+ 512", "shared_memory + 0"),
    ("kept norm", "rows share a row's memory", r"threadIdx\.y \* padded", "0 * padded"),
    ("norm", "all rows store at the first", r"out0\[r\]", "out0[0]"),
    # --------------------------------------------------------------------------- wrong dtypes
    ("softmax", "rounds the sum to an integer", r"\(f32\)a1_sum;", "(f32)(i32)a1_sum;"),
    ("softmax", "adds up in another precision", r"a1_sum \+ v3", "(f32)((f64)a1_sum + (f64)v3 * 1.0000001)"),
    ("softmax", "rounds to half", r"const f32 v5 = v5_q\[k\];", "const f32 v5 = __int_as_float(__float_as_int(v5_q[k]) & 0xffffe000);"),
    ("norm", "does not round to half", r"round_f16\(\(f32\)v13\)", "v13 * 1.001f"),
    ("norm", "adds up in half", r"a1_sum \+ v2;", "half_value(half_bits(a1_sum + v2));"),
    ("norm", "stores bits of another format", r"Store<f16>::of\(a0\)", "Store<f16>::of(half_value((u16)(half_bits(a0) >> 3)))"),
    ("argmax", "writes 32 bits for 64", r"out1\[r\] = Store<i64>::of\(a1\)", "((i32*)out1)[r] = (i32)a1"),
    ("argmax", "adds up in float32", r"a0_sum \+ v1;", "(f64)((f32)a0_sum + (f32)v1);"),
    ("argmax", "places in 8 bits", r"\(i64\)a1_sum\.at", "(i64)(i8)a1_sum.at"),
    ("chain", "contracts a product and a sum", r"const f32 v4 = v2 \+ v3;", "const f32 v4 = fmaf(v0, v1, v3);"),
    ("chain", "holds a number that varies", r"value\(in2\)", "1.0f"),
    # ------------------------------------------------------------------- NaN loss and the like
    ("norm", "loses NaN in a maximum", r"maximum\(a0_sum, v0\)", "(a0_sum > v0 ? a0_sum : v0)"),
    ("norm", "skips NaN", r"if \(valid\) a0_sum", "if (valid && v0 == v0) a0_sum"),
    ("chain", "loses NaN in a maximum", r"maximum\(v4, v5\)", "fmaxf(v4, v5)"),
    ("argmax", "skips NaN", r"if \(valid\) a0_sum", "if (valid && v0 == v0) a0_sum"),
    ("argmax", "does not find NaN", r"if \(valid\) a1_sum", "if (valid && v0 == v0) a1_sum"),
    ("softmax", "starts from zero, not from the least", r"F32_OF_BITS\(0xff800000u\)", "0"),
    ("norm", "starts from zero, not from the least", r"F32_OF_BITS\(0xff800000u\)", "0"),
    ("softmax", "takes no maximum away", r"v0 - a0", "v0"),
    ("softmax", "multiplies by a rounded reciprocal", r"const f32 v5 = v5_q\[k\];", "const f32 v5 = v3_at[j][k] * (1.0f / a1);"),
    ("norm", "takes the wrong root", r"sqrtf\(v11\)", "(1.0f + 0.5f * (v11 - 1.0f))"),
    ("chain", "flushes denormals", r"const f32 v12 = v6 - v11;", "const f32 v12 = fabsf(v6 - v11) < 1.2e-38f ? 0.0f : v6 - v11;"),
    ("argmax", "the last of equals wins", r"first_max\(a1_sum, Found<f64>\{v0, c\}\)", "(v0 >= a1_sum.number || v0 != v0 || a1_sum.at < 0 ? Found<f64>{v0, c} : a1_sum)"),
]  # fmt: skip


# What comes of these is decided by when threads run, and by what was in shared memory before: the
# emulator shows them all, a GPU may give the right results all the same.
OF_TIMING = frozenset(
    [
        "no barrier before the maxima are read",
        "no barrier before the sums are read",
        "one warp alone comes to the barrier",
        "no barrier",
        "sums lie where maxima are still read",
        "the row lies where maxima are",
        "reads what other threads keep",
        "every second warp does not write",
        "partial results of both in one place",
        "rows share a row's memory",
    ]
)


# The first read memory that nothing is made of, which the emulator sees; the others read or write
# packets at addresses that they must not have, after which a process cannot use its GPU.
UNSEEN_ON_A_GPU = frozenset(["takes the seam one too late"])
FATAL_ON_A_GPU = frozenset(["stores one place on", "loads one place on"])


def planted(text, pattern, replacement, number=0):
    """Return ``text`` with one match of the pattern replaced; None if there is none.

    Where passes are written for arrays that pack and for those that do not, in both.
    """
    parts = re.split(r"(const Index step = (?:1|threads);)", text)
    spoilt = [_replaced(part, pattern, replacement, number) for part in parts]
    of_passes = [t for t in spoilt[2::2] if t is not None] if len(parts) > 1 else []
    if of_passes:
        spoilt[0] = None
    if all(t is None for t in spoilt):
        return None
    return "".join(part if t is None else t for part, t in zip(parts, spoilt, strict=True))


def _replaced(text, pattern, replacement, number):
    matches = list(re.finditer(pattern, text))
    if number >= len(matches):
        return None
    m = matches[number]
    return text[: m.start()] + m.expand(replacement) + text[m.end() :]
