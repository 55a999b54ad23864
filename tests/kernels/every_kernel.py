"""Kernels of all files, each with a name and the types that it is compiled for."""

import itertools

import ml_dtypes
import numpy as np

from rtxarr.kernels import philox

INTEGER_POINTERS = ("int64", 1, "C")


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def philox_cases():
    from rtxarr.kernels._philox_cuda import kernel

    double, single, word = ("float64",) * 6, ("float32",) * 6, ("uint64",) * 6
    kinds = [
        ("word32", ["uint32"], word),
        ("below32", ["bool"], word),
        ("uniform32", ["float32", "float16", "bfloat16"], single),
        ("normal32", ["float32", "float16", "bfloat16"], double),
        ("exponential32", ["float32", "float16", "bfloat16"], double),
        ("uniform64", ["float64"], double),
        ("normal64", ["float64"], double),
        ("exponential64", ["float64"], double),
        ("signed64", ["int8", "int16", "int32", "int64"], ("uint64", *("int64",) * 5)),
        ("unsigned64", ["uint8", "uint16", "uint32", "uint64"], word),
    ]
    assert {kind for kind, _, _ in kinds} == set(philox._kinds)
    for kind, dtypes, params in kinds:
        for name in dtypes:
            signature = ((name, 1, "C"), "uint64", "uint64", "uint64", *params)
            yield f"{kind}-{name}", kernel(kind, dtype_of(name)), signature


def segment_cases():
    from rtxarr.kernels._segment_cuda import OPERATIONS, kernels

    variants = [(op, "float32", True, False) for op in OPERATIONS]
    variants += [("sum", name, True, True) for name in ("float32", "float16", "bfloat16")]
    variants += [("max", name, True, False) for name in ("float16", "bfloat16")]
    narrow = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8", "complex64")
    variants += [("sum", name, False, False) for name in narrow]
    variants += [("mean", "float16", False, False), ("min", "int32", False, True)]
    for op, name, wide, gathered in variants:
        values, pointers = (name, 1, "C"), INTEGER_POINTERS
        scalar = "float32" if name in ("float16", "bfloat16") else name
        partial = (scalar, 1, "C")
        signatures = [
            (values, pointers, pointers, values, "int64", "int64"),
            (values, pointers, pointers, partial, "int64", "int64"),
            (pointers, partial, values, "int64", "int64"),
        ]
        found = kernels(op, dtype_of(name), wide, gathered)
        for kernel, signature in zip(found, signatures, strict=True):
            title = f"{op}-{name}{'-wide' * wide}{'-gathered' * gathered}-{kernel.__name__}"
            yield title, kernel, signature


def optimizers_cases():
    from rtxarr.kernels._optimizers_cuda import count_steps, kernel
    from rtxarr.kernels.optimizers import N_STATES

    words, state = INTEGER_POINTERS, ("float32", 1, "C")
    for name in ("float32", "float16", "bfloat16", "float64"):
        numbers = ("float64" if name == "float64" else "float32", 1, "C")
        signature = (words, "int64", words, numbers)
        longest = ("adam", True)
        keys = [key for key in N_STATES if key[0] != "adamw"]  # the same kernel as adam
        for key in keys if name in ("float32", "bfloat16") else [longest]:
            step = kernel(*key, dtype=dtype_of(name), scaled=False)
            yield f"{key}-{name}", step, signature
        step = kernel(*longest, dtype=dtype_of(name), scaled=True)
        yield f"{longest}-{name}-scaled", step, (*signature, state, "int64", "int64")
        signature = (words, ("float64", 1, "C"), numbers, words, state, "int64")
        for corrects in (False, True):
            yield f"count-{name}", count_steps(dtype_of(name), corrects=corrects), signature


def multi_tensor_cases():
    from rtxarr.kernels import _multi_tensor_cuda as kernels

    words, state = INTEGER_POINTERS, ("float32", 1, "C")
    first = (words, "int64", words)
    for name in ("float32", "float16", "bfloat16", "float64"):
        dtype, wide = dtype_of(name), "float64" if name == "float64" else "float32"
        numbers = (wide, 1, "C")
        yield f"squares-{name}", kernels.squares(dtype), (*first, numbers, "int64")
        yield f"check-{name}", kernels.check(dtype), (*first, state, "int64")
        for inverse in (False, True):
            yield f"scale-{name}", kernels.scale(dtype, inverse=inverse), (*first, numbers, "int64")
        yield f"average-{name}", kernels.average(dtype_of(wide), dtype), (*first, numbers)
    for name in ("float32", "float64"):
        values = (name, 1, "C")
        yield f"finish-{name}", kernels.finish_norm(dtype_of(name)), (values, name, values)
    yield "update_scale", kernels.update_scale(), (state, *("float32",) * 3)


def spmm_cases():
    from rtxarr.kernels._spmm_cuda import join, multiply

    pointers = INTEGER_POINTERS
    for name, wide in [("float32", True), ("float32", False), ("float64", False)]:
        values, key = (name, 1, "C"), f"{name}{'-wide' * wide}"
        signature = (values, values, *(pointers,) * 3, values, "int64")
        for ordered in (False, True):
            kernel = multiply(dtype_of(name), wide, ordered)
            yield f"spmm-{key}{'-ordered' * ordered}", kernel, signature
    for name in ("float32", "float64"):
        signature = ((name, 1, "C"), pointers, (name, 1, "C"), "int64")
        yield f"spmm-join-{name}", join(dtype_of(name)), signature


def dropout_cases():
    from rtxarr.kernels._dropout_cuda import kernel

    for name, scalar in SCALARS.items():
        values = (name, 1, "C")
        for wide in (False, True) if name != "float64" else (False,):
            for flags in [(False, False, False), (True, True, False), (True, False, True)]:
                place = (("uint64", 1, "C"),) if flags[2] else ("uint64",) * 3
                signature = (*(values,) * 4, *place, "int64", "uint64", scalar)
                title = f"dropout-{name}{'-wide' * wide}-{flags}"
                yield title, kernel(dtype_of(name), wide, *flags), signature


SCALARS = dict.fromkeys(("float32", "float16", "bfloat16"), "float32") | {"float64": "float64"}
# How rows of a few lengths are dealt out: (length, whether all begin at multiples of 16 bytes).
LENGTHS = [(5, False), (1024, True), (8191, False), (32_768, True)]


def row_lengths():
    """Give the element type, the type that it is summed in, a length, and whether to be wide."""
    for name in ("float32", "bfloat16"):
        for n, wide in LENGTHS:
            yield name, "float32", n, wide
    yield "float16", "float32", 1024, True
    yield "float64", "float64", 1024, False


def cross_entropy_cases():
    from rtxarr.kernels._cross_entropy_cuda import kernels, label_gradient, label_losses
    from rtxarr.kernels.cross_entropy import label_plan

    for name in ("float32", "float64"):
        values = (name, 1, "C")
        losses, gradient = kernels(dtype_of(name))
        yield f"losses-{name}", losses, (values, values, values, "int64")
        for grad in (values, (name, 1, "A")):  # that of a mean has a stride of 0
            signature = (values, values, grad, values, "int64")
            yield f"gradient-{name}-{grad[2]}", gradient, signature
    for name, scalar, n, wide in row_lengths():
        dtype, values, sums = dtype_of(name), (name, 1, "C"), (scalar, 1, "C")
        plan = label_plan(n, dtype, wide, True)
        numbers = ("int64", scalar, scalar)
        for flags in [(False, False), (True, True)]:
            signature = (values, ("int64", 1, "C"), ("bool", 1, "C"), sums, sums, *numbers)
            yield f"label-losses-{n}-{name}-{flags}", label_losses(dtype, plan, *flags), signature
            kernel = label_gradient(dtype, plan, flags[0])
            for grad in (sums, (scalar, 1, "A")) if flags[0] else (sums,):
                signature = (values, sums, grad, grad, ("int32", 1, "C"), values, *numbers)
                yield f"label-gradient-{n}-{name}-{flags[0]}-{grad[2]}", kernel, signature


def activation_cases():
    from rtxarr.kernels._activation_cuda import backward, forward, gate, gate_backward
    from rtxarr.kernels.activation import BACKWARD, FORWARD

    for name in ("float32", "float16", "bfloat16", "float64"):
        values = (name, 1, "C")
        for wide in (True, False):
            key = f"{name}{'-wide' * wide}"
            for which in FORWARD:
                yield f"{which}-{key}", forward(which, dtype_of(name), wide), (values,) * 2
            for which in BACKWARD:
                title = f"{which}-backward-{key}"
                yield title, backward(which, dtype_of(name), wide), (values,) * 3
            for which in FORWARD:
                for halves in (False, True):
                    title, options = f"{which}-gate-{halves}-{key}", (halves, dtype_of(name), wide)
                    yield title, gate(which, *options), (*(values,) * 3, "int64")
                    kernel = gate_backward(which, *options)
                    yield f"{title}-backward", kernel, (*(values,) * 5, "int64")


def group_norm_cases():
    from rtxarr.kernels._group_norm_cuda import channels_first, channels_last, of_parameters
    from rtxarr.kernels._plan import plan_rows
    from rtxarr.kernels.group_norm import _LANES, _PIECES

    for name, scalar in SCALARS.items():
        dtype, values, sums = dtype_of(name), (name, 1, "C"), (scalar, 1, "C")
        wide, affine = name != "float64", (*(values,) * 4, sums, sums)
        plan = plan_rows(4096, dtype, wide=wide, pieces=_PIECES, most=16, lanes=_LANES)
        for silu in (False, True) if name == "float32" else (True,):
            last = channels_last(dtype, wide, (40, 8), (True, True), silu, silu)
            both = [
                channels_first(dtype, plan, (True, True), silu, ahead) for ahead in (False, True)
            ]
            for kind, found in (("last", last), ("first", both[0]), ("first-ahead", both[1])):
                numbers = ("int64",) * (5 if kind == "last" else 4)
                channels = (sums, sums) * (kind == "last")
                signatures = {
                    "sums": (values, sums, sums, *numbers),
                    "apply": (*(values,) * 3, *(sums,) * 4, values, scalar, *numbers),
                    "gradient_sums": (*affine, sums, sums, *channels, *numbers),
                    "gradient": (
                        *(*affine, sums, sums, *channels, values),
                        *((values, values) * (kind == "last")),
                        *numbers,
                    ),
                }
                if silu and name == "float32":
                    del signatures["sums"]  # the same as without
                for key, signature in signatures.items():
                    title = f"channels-{kind}-{name}{'-silu' * silu}-{key}"
                    yield title, getattr(found, key), signature
        signature = (sums, sums, values, values, "int64", "int64")
        yield f"parameters-{name}", of_parameters(dtype), signature


def norm_cases():
    from rtxarr.kernels._norm_cuda import backward, backward_with_sums, columns, forward, join
    from rtxarr.kernels.norm import backward_plan, forward_plan

    for name, scalar, n, wide in row_lengths():
        dtype, values, sums = dtype_of(name), (name, 1, "C"), (scalar, 1, "C")
        plan = forward_plan(n, dtype, wide)
        for flags in [(True, True, True), (False, True, False)]:
            signature = (*(values,) * 4, sums, sums, "int64", scalar)
            yield f"forward-{n}-{name}-{flags}", forward(dtype, plan, *flags), signature
        signature = (*(values,) * 3, sums, sums, values)
        plan = backward_plan(n, dtype, wide, with_sums=True)
        for flags in [(True, True, 2), (False, True, 1)] if plan.resident else []:
            kernel = backward_with_sums(dtype, plan, *flags)
            yield f"backward-{n}-{name}-{flags}", kernel, (*signature, sums, sums, "int64")
        plan = backward_plan(n, dtype, wide, with_sums=False)
        yield f"backward-{n}-{name}", backward(dtype, plan, True, True), (*signature, "int64")
    for name, scalar in SCALARS.items():
        values, sums = (name, 1, "C"), (scalar, 1, "C")
        signature = (values, values, *(sums,) * 4, "int64")
        yield f"columns-{name}", columns(dtype_of(name), name != "float64", True), signature
        yield f"join-{name}", join(dtype_of(name)), (sums, sums, values, values)


def modes_cases():
    from rtxarr.kernels._modes_cuda import back, forward
    from rtxarr.kernels.modes import MAX_MODES, rounded

    values = ("float32", 1, "C")
    for n_modes in sorted({rounded(n) for n in range(1, MAX_MODES + 1)}):
        for make in (forward, back):
            signature = (values, values, values, "int64", "int64")
            yield f"{make.__name__}-{n_modes}", make(n_modes), signature


def transpose_cases():
    from rtxarr.kernels._transpose_cuda import swap, word

    for n_bytes in (2, 4, 8, 16):
        values = (np.dtype(word(n_bytes)).name, 1, "C")
        for wide_in, wide_out in itertools.product((False, True), repeat=2):
            if n_bytes == 2 and (wide_in or wide_out) or n_bytes == 16 and not wide_in * wide_out:
                continue
            title = f"{values[0]}-{n_bytes}{'-in' * wide_in}{'-out' * wide_out}"
            yield title, swap(n_bytes, wide_in, wide_out), (values, values, "int64", "int64")


def rotary_cases():
    from rtxarr.kernels._rotary_cuda import kernel

    for name, scalar in SCALARS.items():
        values, angles = (name, 1, "C"), (scalar, 1, "C")
        signature = (values, angles, angles, values, *("int64",) * 7, scalar)
        for wide in (False, True) if name != "float64" else (False,):
            for interleaved in (False, True):
                title = f"rotary-{name}{'-wide' * wide}{'-interleaved' * interleaved}"
                yield title, kernel(dtype_of(name), wide, interleaved, 4), signature


def softmax_cases():
    from rtxarr.kernels._softmax_cuda import backward, forward
    from rtxarr.kernels.softmax import backward_plan, forward_plan

    for name, _, n, wide in row_lengths():
        dtype, values = dtype_of(name), (name, 1, "C")
        for flag in (False, True):
            kernel = forward(dtype, forward_plan(n, dtype, wide, True), flag)
            yield f"softmax-{n}-{name}-{flag}", kernel, (values, values, "int64", "int64")
            kernel = backward(dtype, backward_plan(n, dtype, wide, True), flag)
            yield f"softmax-back-{n}-{name}-{flag}", kernel, (*(values,) * 3, "int64", "int64")


def product_cases():
    from rtxarr.kernels._product_cuda import products

    for name in SCALARS:
        wide, pointers = SCALARS[name], INTEGER_POINTERS
        values, numbers = (name, 1, "C"), (wide, 1, "C")
        for gathered, in_parts in ((True, False), (False, True)):
            index = ("int32", 1, "C") if gathered else pointers
            found = [numbers if in_parts else values, numbers, "int64", "int64"]
            for width in {"float32": (1, 4), "float64": (2,)}.get(name, (4,)):
                rows, chunks, join = products(dtype_of(name), width, gathered, in_parts)
                title, given = f"-{name}-{width}-{in_parts}", (values, pointers, index)
                yield f"rows{title}", rows, (*given, *found)
                yield f"chunks{title}", chunks, (*given, numbers, numbers, *found[2:])
            yield f"join{title}", join, (pointers, numbers, numbers, *found)


def rank_cases():
    from rtxarr.kernels._rank_cuda import ranked

    for name in SCALARS:
        values, pointers = (name, 1, "C"), INTEGER_POINTERS
        for gathered in (True, False):
            index = ("int32", 1, "C") if gathered else pointers
            kernels = ranked(dtype_of(name), gathered)
            for title, kernel in zip(("short", "middle", "wide", "long"), kernels, strict=True):
                signature = (values, pointers, index, pointers, values, values, "int64")
                yield f"{title}-{name}-{gathered}", kernel, signature


def group_norm_cluster_cases():
    from rtxarr.kernels._group_norm_cluster_cuda import resident

    for name, per_processor in (("bfloat16", 4), ("float32", 2), ("float16", 1)):
        values, sums, numbers = (name, 1, "C"), ("float32", 1, "C"), ("int64",) * 6
        block = 32, 8 if per_processor == 4 else 16
        kernels = resident(dtype_of(name), block, (True, True), per_processor, 40_000)
        signature = (*(values,) * 3, sums, sums, values, "float32", *numbers)
        yield f"once-{name}-sm_90", kernels.normalize, signature
        signature = (*(values,) * 3, *(sums,) * 4, values, *numbers)
        yield f"once-gradient-{name}-sm_90", kernels.gradient, signature


def scatter_variants():
    """Give titles, options, and the types of values and of sums."""
    variants = [("sum", "float32", True), ("sum", "bfloat16", True), ("sum", "float64", False)]
    variants += [("mean", "float16", True), ("max", "bfloat16", False)]
    for op, name, wide in variants:
        sums = "float32" if name in ("float16", "bfloat16") else name
        title, of = f"{op}-{name}{'-wide' * wide}", (op, dtype_of(name), wide, 64)
        yield title, of, (name, 1, "C"), (sums, 1, "C")


def scatter_cases():
    from rtxarr.kernels._scatter_cuda import add_up, group, join, order

    words, numbers, two = ("uint32", 1, "C"), ("int32", 1, "C"), ("int64",) * 2
    for name in ("int64", "int32"):
        yield f"group-{name}", group(17), ((name, 1, "C"), words, words, numbers, "int64")
    for most_rows in (512, 8192):
        signature = (words, words, *(numbers,) * 3, *two)
        yield f"order-{most_rows}", order(17, most_rows, 64), signature
    for title, of, values, partial in scatter_variants():
        for groups in (2, 256) if of[2] else (16,):
            signature = (values, *(numbers,) * 3, partial, values, *two)
            yield f"add-up-{title}-{groups}", add_up(*of, groups), signature
        yield f"join-{title}", join(of[0], of[1], 64), (numbers, partial, values, "int64")


def few_cases():
    from rtxarr.kernels._scatter_few_cuda import EACH, combine_few

    for title, of, values, partial in scatter_variants():
        of = (*of[:3], 16)
        index = ("int32" if of[0] == "mean" else "int64", 1, "C")
        for each in EACH if title.startswith("sum-float32") else EACH[-1:]:
            kernel = combine_few(*of, 16, 0 if of[2] else 3, each)
            yield f"few-{title}-{each}", kernel, (index, values, partial, values, *("int64",) * 5)


def sort_cases():
    from rtxarr.kernels._sort_cuda import bounds, by_rank, radix

    counts, totals, pointers = ("int64", 2, "C"), INTEGER_POINTERS, INTEGER_POINTERS
    for name in ("int64", "int32", "uint8"):
        index, order = (name, 1, "C"), ("int32", 1, "C")
        for kind in (np.int32, np.int64):
            kernel = by_rank(64, 16, kind)
            yield f"by-rank-{name}-{kind}", kernel, (index, pointers, order, "int64")
        for first in (True, False) if name == "int64" else (True,):
            _, count, scan, scatter = radix(6, 256, 16, first)
            yield f"count-{name}", count, (index, counts, "int64", "int64")
            signature = (index, order, counts, totals, pointers, order, "int64", "int64")
            yield f"scatter-{name}-{first}", scatter, signature
    yield "scan", scan, (counts, totals)
    yield "bounds", bounds, (pointers, pointers)


PLACES = [(True, False), (False, True), (False, False)]  # wide, loose


def scan_cases():
    from rtxarr.kernels._scan_cuda import along_columns, along_rows
    from rtxarr.kernels.scan import row_plan

    variants = [("sum", "float32", n, *place) for n in (100, 1_000_000) for place in PLACES]
    variants += [("sum", name, 1_000_000, True, False) for name in ("float16", "bfloat16")]
    variants += [("prod", "float16", 1_000_000, False, True), ("sum", "float64", 9, False, False)]
    for name in ("float64", "complex64", "complex128", "int64"):
        variants.append(("prod", name, 1_000_000, False, False))
    variants.append(("sum", "complex64", 100, False, False))
    variants += [
        ("max", "float32", 1_000_000, True, False),
        ("min", "int64", 1_000_000, False, False),
    ]
    variants.append(("max", "float16", 100, True, False))
    for i, (op, name, n, wide, loose) in enumerate(variants):
        dtype, values, reverse = dtype_of(name), (name, 1, "C"), i % 2 == 1
        ends = ("float32" if name in ("float16", "bfloat16") else name, 1, "C")
        # Half of complex128 is a float64.
        title = f"{op}-{name}{'-float64' * (name == 'complex128')}-{n}-{wide}{'-back' * reverse}"
        plan = row_plan(n, dtype, wide, loose)
        totals, scan = along_rows(op, dtype, plan, reverse)
        yield f"{title}-rows", scan, (values, ends, values, *("int64",) * 3)
        if plan.resident:
            continue
        yield f"{title}-totals", totals, (values, ends, *("int64",) * 3)
        totals, scan = along_columns(op, dtype, wide, reverse)
        yield f"{title}-columns", scan, (values, ends, values, *("int64",) * 4)
        yield f"{title}-column-totals", totals, (values, ends, *("int64",) * 4)


def fp8_cases():
    from rtxarr.kernels._fp8_cuda import advance, quantize

    single = ("float32", 1, "C")
    rest = (("int32", 1, "C"), *("int64",) * 3)
    # Each of the three devices that a kernel is compiled for gets some of these.
    for name, converts, wide, turned, kind in itertools.product(
        ("float32", "float16", "bfloat16"),
        (False, True),
        (True, False),
        (False, True),
        ("e4m3", "e5m2"),
    ):
        words = [(word, 1, "C") for word in (("uint64", "uint32") if wide else ("uint8",) * 2)]
        signature = ((name, 1, "C"), single, *words, *rest)
        parts = [f"{kind}-{name}", *["wide"] * wide, *["turned"] * turned, *["sm_89"] * converts]
        yield "-".join(parts), quantize(dtype_of(name), kind, turned, wide, converts), signature
    yield "advance", advance(), ((single,) * 3 + ("float32",) * 3 + ("int64",))


def elementwise_cases():
    from rtxarr.kernels import _elementwise_cuda as kernels
    from rtxarr.kernels.elementwise import BINARY, UNARY

    single = dtype_of("float32")
    for name in ("float32", "float16", "bfloat16"):
        dtype, three = dtype_of(name), ("int64",) * 3
        for which in UNARY if name != "float16" else UNARY[:1]:
            yield f"{which}-{name}", kernels.unary(which, dtype), three
        for which in BINARY if name != "float16" else BINARY[:1]:
            yield f"{which}-{name}", kernels.binary(which, dtype, "arrays"), (*three, "int64")
        for side in ("first", "second"):
            for what, kind in (("number", "float32"), ("one", "int64")):
                kernel = kernels.binary("subtract", dtype, f"{what} {side}")
                yield f"subtract-{what}-{side}-{name}", kernel, ("int64", kind, "int64", "int64")
        for side in ("first", "second"):
            kernel = kernels.binary_with_row("subtract", dtype, side)
            yield f"subtract-row-{side}-{name}", kernel, ("int64",) * 6
        for form in ("arrays", "one"):
            signature = ("int64", "int64", "float32", "int64", "int64")
            yield f"scaled-{form}-{name}", kernels.scaled_product(dtype, form), signature
    for name in ("float16", "bfloat16"):
        for pair in ((dtype_of(name), single), (single, dtype_of(name))):
            yield "-to-".join(map(str, pair)), kernels.conversion(*pair), ("int64",) * 3


PLACE = ("uint64", "uint64")
HALF_POINTERS = ("int32", 1, "C")


def sampling_cases():
    from rtxarr.kernels import _sampling_cuda as kernels

    whole, halves = INTEGER_POINTERS, HALF_POINTERS
    weights, rows = ("float64", 1, "C"), (whole,) * 3
    signatures = {
        "keep": (whole,) * 4,
        "draw_subsets": (*rows, whole, whole, *PLACE),
        "draw_again": (*rows, whole, whole, *PLACE),
        "draw_weighted_again": (*rows, whole, weights, whole, *PLACE),
        "sum_rows": (whole, weights, weights, whole),
        "walks": (("int64", 2, "C"), whole, "int64", whole, halves, *("uint64",) * 3, *PLACE),
        "negatives": (("int64", 2, "C"), *(whole,) * 4, "int64", *PLACE),
    }
    for name, signature in signatures.items():
        yield name, getattr(kernels, name), signature
    for most in (8, 16, 32):
        yield f"draw_few-{most}", kernels.draw_few(most), (*rows, whole, whole, *PLACE)


def numbering_cases():
    from rtxarr.kernels import _numbering_cuda as kernels

    whole, halves = INTEGER_POINTERS, HALF_POINTERS
    counted = (whole, "int64", "int64", whole)
    signatures = {
        "sum_counts": counted,
        "sum_totals": (whole,),
        "write_offsets": (*counted, whole),
        "find_outside": (whole, "int64", halves),
        "look_up": (whole,) * 7,
        "gather_edges": (whole, "int64", halves, whole, halves, whole),
        "cut_offsets": (whole, whole, whole, ("int64", 2, "C")),
        "enter": (whole, whole, halves, whole, whole, "int64"),
        "find": (whole, halves, whole, whole, "int64", halves, whole),
        "rank": (whole, halves, whole, halves, whole, halves, whole),
        "number": (whole, whole, whole, halves, halves, whole, whole),
    }
    for name, signature in signatures.items():
        yield name, getattr(kernels, name), signature


def selection_cases():
    from rtxarr.kernels import _selection_cuda as kernels

    whole, halves, weights = INTEGER_POINTERS, HALF_POINTERS, ("float64", 1, "C")
    rows, table = (whole,) * 3, ("int64", whole, "int64")
    drawn = (*rows, whole, weights, whole)
    signatures = {
        "enter_rows": (*rows, *table),
        "list_rows": (*rows, *table, *(whole,) * 7),
        "copy_rows": (whole,) * 5,
        "select_short": (*drawn, whole, whole, *PLACE),
        "select_pieces": (*drawn, *(whole,) * 3, "int64", *(whole,) * 4, *PLACE),
        "select_long": (*(whole,) * 5, "int64", *(whole,) * 3, "int64", whole),
        "draw_long": (*rows, whole, whole, weights, whole, whole, weights, whole, *PLACE),
        "count_rows": (whole, "int64", *(whole,) * 5),
        "copy_counts": (whole, "int64", whole, whole),
    }
    for name, signature in signatures.items():
        yield name, getattr(kernels, name), signature
    for writes in (False, True):
        head, tail = (whole, whole, halves, "int64", whole), (whole, whole, whole, *PLACE)
        yield f"kept_short-{writes}", kernels.kept_short(writes), (*head, whole, *tail)
        yield f"kept_pieces-{writes}", kernels.kept_pieces(writes), (*head, whole, whole, *tail)


def walks_cases():
    from rtxarr.kernels._walks_cuda import walks_of_blocks

    for indices in (HALF_POINTERS, INTEGER_POINTERS):
        whole, words = INTEGER_POINTERS, ("uint64",) * 3
        signature = (("int64", 2, "C"), whole, "int64", whole, indices, *words, *PLACE)
        yield f"walks-{indices[0]}", walks_of_blocks(8, 16), signature


def points_cases():
    from rtxarr.kernels._points_cuda import append, search, sort_rows, tally

    whole, cells = INTEGER_POINTERS, ("int32", 1, "C")
    for name in ("float32", "float64"):
        flat, rows, dtype = (name, 1, "C"), (name, 2, "C"), dtype_of(name)
        found = (whole, whole, flat, whole)
        box = (*(name,) * 5, *("int64",) * 3)
        for packed in (True, False):
            first = (flat, whole, flat, cells, *box) if packed else (rows, whole, rows, whole)
            title = f"{name}{'-packed' * packed}"
            for n in (1, 16, 64 if name == "float32" else 32):
                signature = (*first, "int64", name, "int64", "int64", *found)
                yield f"nearest-{n}-{title}", search(dtype, n, packed), signature
            signature = (*first, "int64", name, *found)
            yield f"tally-{title}", tally(dtype, packed), signature
            yield f"append-{title}", append(dtype, packed), signature
        yield f"sort-{name}", sort_rows(dtype), (whole, flat, whole)


def points_grid_cases():
    from rtxarr.kernels._points_grid_cuda import ends, sort

    whole, half = INTEGER_POINTERS, ("int32", 1, "C")
    for name in ("float32", "float64"):
        flat, rows, dtype = (name, 1, "C"), (name, 2, "C"), dtype_of(name)
        yield f"ends-{name}", ends(dtype), (flat, "int64", (name, 3, "C"))
        box = (*(name,) * 4, *("int64",) * 3)
        yield f"count-{name}", sort(dtype).count, (rows, whole, *box, half, half, half)
        yield f"move-{name}", sort(dtype).move, (rows, half, half, half, flat, whole)


def points_tree_cases():
    from rtxarr.kernels._points_tree_cuda import making, search

    whole, numbers = INTEGER_POINTERS, ("int64",) * 4
    for name in ("float32", "float64"):
        flat, rows, dtype = (name, 1, "C"), (name, 2, "C"), dtype_of(name)
        found = (whole, whole, flat, whole)
        first = (flat, whole, whole, whole, flat, flat, "int64", "int64")
        for n in (1, 16, 64 if name == "float32" else 32):
            signature = (*first, "int64", name, "int64", "int64", *found)
            yield f"nearest-{n}-{name}", search(dtype, n), signature
        made = making(dtype)
        yield f"keys-{name}", made.keys, (rows, whole, *(name,) * 5, *numbers[:3], whole)
        yield f"pack-{name}", made.pack, (rows, whole, flat)
        yield f"leaves-{name}", made.leaves, (flat, flat, "int64")
        yield f"level-{name}", made.level, (flat, *numbers)


def farthest_cases():
    from rtxarr.kernels._farthest_cuda import pack, rounds

    whole = INTEGER_POINTERS
    for name in ("float32", "float64"):
        flat, rows, dtype = (name, 1, "C"), (name, 2, "C"), dtype_of(name)
        yield f"pack-{name}", pack(dtype), (rows, flat)
        between = (name, 3, "C"), ("int64", 3, "C"), ("int64", 2, "C")
        for packed in (True, False):
            x = flat if packed else rows
            signature = (x, flat, whole, whole, *between, "int64", "int64")
            yield f"rounds-{name}{'-packed' * packed}", rounds(dtype, packed), signature


def gather_product_cases():
    from rtxarr.kernels._gather_product_cuda import summed_products

    lengths, row = ("int32", 1, "C"), ("float32", 1, "C")
    for gathered, biased, keeps in ((True, False, True), (True, True, False), (False, True, True)):
        kernel = summed_products(gathered=gathered, biased=biased, keeps=keeps)
        first = lengths if gathered else INTEGER_POINTERS
        items = (INTEGER_POINTERS, lengths, lengths, "int64", first)
        yield f"gathered-{gathered}-{biased}", kernel, (*items, *[row] * 7, *["int64"] * 4)


def gather_cases():
    from rtxarr.kernels._gather_cuda import Types, reduction

    def signature(types, index, gathered):
        flat = [pointers if t is None else (t, 1, "C") for t in types]
        wide, lengths = SCALARS[types[0]], ("int32", 1, "C")
        first = index if gathered else "int64"
        items = (pointers, lengths, lengths, "int64", (first, 1, "C"), pointers)
        return (*items, *flat, (wide, 1, "C"), *("int64",) * 3, wide)

    pointers = INTEGER_POINTERS
    kinds = {  # what becomes of a total, and the types of the other arrays
        "sum": ("plain", None, None, "x"),
        "mean": ("mean", None, None, "x"),
        "max": ("filled", None, None, "x"),
        "weighted": ("plain", None, "x", "x"),
        "biased": ("biased", "x", "x", "x"),
        "scaled": ("plain", None, "wide", "x"),
        "squares": ("mean", "wide", None, "x"),
        "ties": ("share", "x", "x", "wide"),
        "matched": ("plain", "x", "wide", "x"),
        "difference": ("plain", "x", "x", "x"),
        "others": ("plain", "x", "wide", "wide"),
    }
    variants = [("float32", kind, 4) for kind in kinds] + [("float32", "weighted", 1)]
    variants += [("float16", kind, 8) for kind in ("sum", "max", "weighted", "ties", "matched")]
    variants += [("bfloat16", kind, 8) for kind in ("mean", "squares", "matched")]
    variants += [("float64", "max", 2), ("float64", "matched", 1), ("float16", "sum", 4)]
    for name, kind, width in variants:
        wide = SCALARS[name]
        end, *others = kinds[kind]
        arrays = [name, *({"x": name, "wide": wide}.get(t) for t in others)]
        types = Types(*(t if t is None else dtype_of(t) for t in arrays))
        real = {"mean": "sum", "biased": "weighted"}.get(kind, kind)
        flags = {"ordered": width > 1, "headed": width > 1} if kind == "weighted" else {}
        kernel = reduction(real, end, width, types, gathered=True, **flags)
        index = "int32" if width > 1 else "int64"
        yield f"{kind}-{name}-{width}", kernel, signature(arrays, index, True)
        if kind in ("mean", "max", "ties", "biased"):  # which end in four ways
            own = arrays[1] if kind == "biased" else None
            arrays = [wide, own, arrays[2] if kind == "ties" else None, arrays[3]]
            types = Types(*(t if t is None else dtype_of(t) for t in arrays))
            joined = "max" if kind == "max" else "sum"
            kernel = reduction(joined, end, width, types, gathered=False)
            yield f"join-{kind}-{name}", kernel, signature(arrays, None, False)


# Items, their number of pieces, and the sources of edges, as the kernels over edges take them.
ITEMS = (INTEGER_POINTERS, ("int32", 1, "C"), ("int32", 1, "C"), "int64")
SOURCES = ("int32", 1, "C")


def head_shapes():
    """Give an element type, the type that it is summed in, heads, features, and whether wide."""
    yield from [("float32", "float32", 4, 32, True), ("float16", "float32", 4, 32, True)]
    yield from [("float32", "float32", 1, 7, False), ("bfloat16", "float32", 1, 512, True)]
    yield from [("float64", "float64", 2, 8, False), ("float32", "float32", 1, 128, True)]


def edge_attention_variants():
    """Give shapes of heads with kinds of scores; what is left out of a kind is tried too."""
    from rtxarr.kernels._edge_attention_cuda import Variant
    from rtxarr.kernels._heads import plan_heads

    options = {"edges": True, "numbered": True, "drops": True}
    for shape in head_shapes():
        name, _, n_heads, n_features, wide = shape
        plan = plan_heads(dtype_of(name), n_heads, n_features, wide=wide)
        variants = [Variant("additive"), Variant("mlp"), Variant("dot")]
        if n_features == 128:
            variants = [Variant("additive", False, **options), Variant("mlp", drops=True)]
            variants += [Variant("dot", **options), Variant("mlp", edges=True)]
        if name == "float16":
            variants += [Variant("mlp", edges=True), Variant("dot", edges=True)]
        if n_features == 7:
            variants = [Variant("additive", True, **options)]
        for variant in variants:
            yield shape, plan, variant


def edge_attention_signature(name, scalar, variant, *rest):
    values, sums, place = (name, 1, "C"), (scalar, 1, "C"), ("uint64", 1, "C")
    terms = sums if variant.kind == "additive" else values
    types = {"v": values, "s": sums, "t": terms}
    drop = (place, *("uint64",) * 4, scalar)
    scores = (SOURCES, INTEGER_POINTERS, terms, terms, values, values, values, scalar)
    return (*scores, *(types[x] for x in "".join(rest)), *drop)


def edge_attention_cases():
    from rtxarr.kernels._edge_attention_cuda import forward, join, join_sums

    for (name, scalar, *_), plan, variant in edge_attention_variants():
        signature = (*ITEMS, *edge_attention_signature(name, scalar, variant, "vsss"))
        title = f"attend-{name}-{plan.n_features}-{variant}"
        yield title, forward(dtype_of(name), plan, variant), signature
    for name, scalar in SCALARS.items():
        values, sums = (name, 1, "C"), (scalar, 1, "C")
        for as_pair in (False, True):
            signature = (*ITEMS, sums, sums, values, *(sums,) * 3, "int64", "int64")
            yield f"join-{name}-{as_pair}", join(dtype_of(name), as_pair), signature
        signature = (*ITEMS, sums, values, sums, "int64")
        yield f"join-sums-{name}", join_sums(dtype_of(name)), signature


def edge_attention_back_cases():
    from rtxarr.kernels._edge_attention_back_cuda import by_destinations, by_sources

    for (name, scalar, *_), plan, variant in edge_attention_variants():
        title, first = f"{name}-{plan.n_features}-{variant}", (*ITEMS, INTEGER_POINTERS)
        rest = "vvsst" + ("v" if variant.rows else "s") + "ss"
        signature = (*first, *edge_attention_signature(name, scalar, variant, rest))
        yield f"by-destinations-{title}", by_destinations(dtype_of(name), plan, variant), signature
        signature = (*first, *edge_attention_signature(name, scalar, variant, "vstvvtss"))
        projected = variant.kind == "additive" and variant.nodes
        kernel = by_sources(dtype_of(name), plan, variant, projected)
        yield f"by-sources-{title}", kernel, signature


def edges_cases():
    from rtxarr.kernels import _edges_cuda as kernels
    from rtxarr.kernels._heads import plan_heads, share_edges

    ids = INTEGER_POINTERS
    for name, scalar, n_heads, n_features, wide in head_shapes():
        dtype, values, sums = dtype_of(name), (name, 1, "C"), (scalar, 1, "C")
        plan, title = plan_heads(dtype, n_heads, n_features, wide=wide), f"{name}-{n_features}"
        for flags in [(False, True, True), (True, True, False), (True, False, True)]:
            signature = (*ITEMS, SOURCES, ids, *(values,) * 5, scalar)
            yield f"dots-{title}-{flags}", kernels.dots(dtype, plan, *flags), signature
        signature = (*ITEMS, SOURCES, ids, *(values,) * 4, sums, scalar)
        yield f"gated-sums-{title}", kernels.gated_sums(dtype, plan, True), signature
        signature = (*(values,) * 3, sums, sums, "int64")
        yield f"head-dots-{title}", kernels.head_dots(dtype, plan), signature
        signature = (values, *(sums,) * 3, "int64")
        yield f"head-sums-{title}", kernels.head_sums(dtype, plan), signature
        for kernel in kernels.softmax(dtype, share_edges(n_heads, 8), True):
            yield f"softmax-{kernel.__name__}-{title}", kernel, (*ITEMS, ids, values, values, sums)
        for kernel in kernels.softmax_gradient(dtype, share_edges(n_heads, 8), False):
            signature = (*ITEMS, ids, *(values,) * 3, sums)
            yield f"softmax-back-{kernel.__name__}-{title}", kernel, signature


def small_cases():
    from rtxarr.kernels._small_cuda import column_sums, share_right

    for name in ("float32", "float64"):
        values = (name, 1, "C")
        for width in (1, 8, 32):
            kernel = column_sums(dtype_of(name), width)
            yield f"columns-{name}-{width}", kernel, (values, values, "int64", "int64")
        for ignores in (False, True):
            for labels in (("int32", 1, "C"), INTEGER_POINTERS):
                signature = (values, labels, ("float64", 1, "C"), "int64", "int64")
                yield f"share-{name}-{ignores}", share_right(dtype_of(name), ignores), signature


CASES = {
    "_edge_attention_cuda": edge_attention_cases,
    "_edge_attention_back_cuda": edge_attention_back_cases,
    "_edges_cuda": edges_cases,
    "_gather_cuda": gather_cases,
    "_gather_product_cuda": gather_product_cases,
    "_elementwise_cuda": elementwise_cases,
    "_activation_cuda": activation_cases,
    "_cross_entropy_cuda": cross_entropy_cases,
    "_fp8_cuda": fp8_cases,
    "_dropout_cuda": dropout_cases,
    "_group_norm_cuda": group_norm_cases,
    "_group_norm_cluster_cuda": group_norm_cluster_cases,
    "_modes_cuda": modes_cases,
    "_norm_cuda": norm_cases,
    "_numbering_cuda": numbering_cases,
    "_multi_tensor_cuda": multi_tensor_cases,
    "_optimizers_cuda": optimizers_cases,
    "_philox_cuda": philox_cases,
    "_farthest_cuda": farthest_cases,
    "_points_cuda": points_cases,
    "_points_grid_cuda": points_grid_cases,
    "_points_tree_cuda": points_tree_cases,
    "_product_cuda": product_cases,
    "_rank_cuda": rank_cases,
    "_rotary_cuda": rotary_cases,
    "_sampling_cuda": sampling_cases,
    "_scan_cuda": scan_cases,
    "_scatter_cuda": scatter_cases,
    "_scatter_few_cuda": few_cases,
    "_segment_cuda": segment_cases,
    "_selection_cuda": selection_cases,
    "_small_cuda": small_cases,
    "_softmax_cuda": softmax_cases,
    "_sort_cuda": sort_cases,
    "_spmm_cuda": spmm_cases,
    "_transpose_cuda": transpose_cases,
    "_walks_cuda": walks_cases,
}
