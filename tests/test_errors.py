"""Public functions name the argument that they cannot take, and what came in its place."""

import inspect
import re

import numpy as np
import pytest

import rtxarr as rx


def ones(*shape):
    return np.ones(shape)


def ints(*values):
    return np.asarray(values)


X, SQUARE, IMAGE = ones(2, 3), np.eye(3), ones(1, 2, 4, 4)
UNARY = (
    "abs acos acosh asin asinh atan atanh ceil conj cos cosh erf exp expm1 floor imag isfinite "
    "isinf isnan log log10 log1p log2 logical_not negative positive real reciprocal round sign "
    "signbit sin sinh sqrt square tan tanh trunc "
    "elu gelu hardsigmoid hardswish leaky_relu log_sigmoid log_softmax logsumexp mish relu selu "
    "sigmoid silu softmax softplus layer_norm rms_norm "
    "all any argmax argmin argsort count_nonzero diff max mean min prod sort std sum var "
    "cumulative_max cumulative_min cumulative_prod cumulative_sum "
    "flip nonzero transpose unstack "
    "unique_all unique_counts unique_inverse unique_values "
    "empty_like ones_like zeros_like iinfo finfo"
)
BINARY = (
    "add atan2 copysign divide equal floor_divide greater greater_equal hypot less less_equal "
    "logaddexp logical_and logical_or logical_xor maximum minimum multiply nextafter not_equal "
    "pow remainder subtract vecdot broadcast_arrays isin "
    "binary_cross_entropy_with_logits cosine_similarity huber_loss kl_div l1_loss mse_loss "
    "smooth_l1_loss soft_cross_entropy"
)
BITS = "bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor"
POOLS = "max_pool2d avg_pool2d adaptive_avg_pool2d"
SPECTRA = "fft ifft irfft hfft fftn ifftn irfftn fftshift ifftshift rfft rfftn ihfft"
MATRICES = (
    "cholesky det diagonal eig eigh eigvals eigvalsh inv matrix_norm matrix_rank pinv qr slogdet "
    "svd svdvals trace vector_norm"
)

# Arguments that each function takes.
CALLS = {
    **dict.fromkeys(UNARY.split(), (X[0] / 3,)),
    **dict.fromkeys(BINARY.split(), (X[0] / 3, X[0] / 3)),
    **{name: (ints(1, 2), ints(1, 2)) for name in BITS.split()},
    **dict.fromkeys(POOLS.split(), (IMAGE, 2)),
    **{f"fft.{name}": (SQUARE,) for name in SPECTRA.split()},
    **{f"linalg.{name}": (SQUARE,) for name in MATRICES.split()},
    **{f"segment_{kind}": (ones(4, 3), ints(0, 2, 4)) for kind in ("sum", "mean", "max", "min")},
    **{f"scatter_{kind}": (ones(4, 3), ints(0, 1, 1, 0), 2) for kind in ("add", "max", "min")},
    "accuracy": (X, ints(0, 1)),
    "arange": (3,),
    "astype": (X, rx.float32),
    "batch_norm": (ones(2, 4, 5), ones(4), ones(4)),
    "bitwise_invert": (ints(1),),
    "broadcast_shapes": ((2, 3), (3,)),
    "broadcast_to": (X, (4, 2, 3)),
    "clip": (X, 0, 1),
    "concat": ([X, X],),
    "conv1d": (ones(1, 2, 5), ones(3, 2, 3)),
    "conv2d": (IMAGE, ones(3, 2, 3, 3)),
    "conv3d": (ones(1, 2, 4, 4, 4), ones(3, 2, 3, 3, 3)),
    "conv_transpose1d": (ones(1, 2, 5), ones(2, 3, 3)),
    "conv_transpose2d": (IMAGE, ones(2, 3, 3, 3)),
    "conv_transpose3d": (ones(1, 2, 4, 4, 4), ones(2, 3, 3, 3, 3)),
    "cross_entropy": (X, ints(0, 1)),
    "dropout": (X, 0.5),
    "dropout_add": (X, X, 0.5),
    "einsum": ("ij,jk->ik", X, X.T),
    "embedding": (ints(0, 1), X),
    "empty": ((2, 3),),
    "expand_dims": (X,),
    "eye": (3,),
    "fft.fftfreq": (4,),
    "fft.rfftfreq": (4,),
    "from_dlpack": (X,),
    "full": ((2, 3), 1.0),
    "full_like": (X, 1.0),
    "gated_linear": (X, ones(4, 3), ones(4, 3)),
    "geglu": (ones(2, 4),),
    "getitem": (X, 0),
    "global_avg_pool": (IMAGE,),
    "global_max_pool": (IMAGE,),
    "glu": (ones(2, 4),),
    "group_norm": (ones(2, 4, 5), 2),
    "index_add": (X, ints(0, 1), X),
    "index_update": (X, ints(0, 1), X),
    "interpolate": (IMAGE,),
    "linalg.cross": (ones(3), ones(3)),
    "linalg.matrix_power": (SQUARE, 2),
    "linalg.outer": (ones(3), ones(3)),
    "linalg.solve": (SQUARE, ones(3)),
    "linear": (X, ones(4, 3)),
    "linspace": (0, 1, 3),
    "matmul": (X, X.T),
    "matrix_transpose": (X,),
    "meshgrid": (X[0], X[0]),
    "moveaxis": (X, 0, 1),
    "nll_loss": (X, ints(0, 1)),
    "one_hot": (ints(0, 1), 3),
    "ones": ((2, 3),),
    "pad": (X, ((1, 1), (0, 0))),
    "permute_dims": (X, (1, 0)),
    "repeat": (X, 2),
    "reshape": (X, (3, 2)),
    "roll": (X, 1),
    "scaled_dot_product_attention": (IMAGE, IMAGE, IMAGE),
    "searchsorted": (X[0], X[0]),
    "squeeze": (ones(1, 3), 0),
    "stack": ([X, X],),
    "swiglu": (ones(2, 4),),
    "take": (X[0], ints(0, 1)),
    "take_along_axis": (X, ints(0, 1, 0).reshape(1, 3)),
    "tensordot": (X, X.T),
    "tile": (X, (2, 1)),
    "to_device": (X, "cpu"),
    "tril": (X,),
    "triu": (X,),
    "where": (X > 0, X, X),
    "zeros": ((2, 3),),
}
OPTIONS = {"interpolate": {"size": (2, 2)}, "tensordot": {"axes": 1}}
CALLS["iinfo"] = CALLS["bitwise_invert"]
CALLS["acosh"] = (X,)

# What is no function of arrays, has tests of its own elsewhere, or is another of a family above.
OTHERS = set(
    "can_cast capture checkpoint current_stream custom_op device device_of devices enable_grad "
    "fuse grad hessian hvp is_recording isdtype jacobian jit jvp memory_stats no_grad result_type "
    "stop_gradient stream synchronize value_and_grad vjp asarray rotary_angles rotary_embedding "
    "spmm adaptive_avg_pool1d adaptive_avg_pool3d avg_pool1d avg_pool3d max_pool1d max_pool3d "
    "linalg.matmul linalg.matrix_transpose linalg.tensordot linalg.vecdot".split()
)

# Places where None means to leave something out, and those of keys, truth and comparisons, which
# anything has.
ANYTHING = {
    ("batch_norm", 1), ("batch_norm", 2), ("clip", 1), ("clip", 2), ("getitem", 0), ("getitem", 1),
    ("where", 0), ("index_add", 1), ("index_update", 1), ("linear", 2), ("astype", 1),
    ("to_device", 1),
    *((name, place) for name in ("equal", "not_equal", "isin", "logical_and", "logical_or")
      for place in (0, 1)),
}  # fmt: skip


def find(name):
    function = rx
    for part in name.split("."):
        function = getattr(function, part)
    return function


def test_every_public_function_is_called():
    names = {n for n in rx.__all__ if inspect.isfunction(getattr(rx, n))}
    for room in ("linalg", "fft"):
        names |= {
            f"{room}.{n}" for n in find(room).__all__ if inspect.isfunction(find(room).__dict__[n])
        }
    assert names == set(CALLS) | OTHERS


@pytest.mark.parametrize("name", sorted(CALLS))
def test_nonsense_is_refused_by_the_name_of_the_argument(name):
    function, args, options = find(name), CALLS[name], OPTIONS.get(name, {})
    function(*args, **options)
    parameters = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind is not p.KEYWORD_ONLY
    ]
    for place in range(len(args)):
        if (name, place) in ANYTHING:
            continue
        for nonsense in (None, object(), {"a": 1}):
            given = list(args)
            given[place] = [nonsense] * 2 if isinstance(args[place], list) else nonsense
            with pytest.raises((TypeError, ValueError, IndexError, AttributeError)) as caught:
                function(*given, **options)
            said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
            argument = parameters[min(place, len(parameters) - 1)]
            if name == "einsum":
                argument = "subscripts" if place == 0 else f"operand {place - 1}"
            assert re.search(rf"\b{argument}\b", said), said


@pytest.mark.parametrize(
    "name", ["sum", "relu", "linear", "conv2d", "fft.fft", "linalg.outer", "stack"]
)
def test_what_is_no_array_is_called_by_its_type(name):
    function, args = find(name), CALLS[name]
    nonsense = [None] if isinstance(args[0], list) else None
    with pytest.raises(TypeError, match="array.*got NoneType"):
        function(nonsense, *args[1:])


def test_a_type_of_numbers_among_the_arguments_is_told_as_such():
    with pytest.raises(ValueError, match="device must be") as caught:
        rx.astype(X, rx.float32, device="tpu:0")
    assert "dtype: <class 'numpy.float32'>" in caught.value.__notes__[0]


def test_transforms_take_whole_numbers_of_points():
    with pytest.raises(TypeError, match=r"n and s must be integers, got \(2.5,\)"):
        rx.fft.fft(X, n=2.5)


def test_the_order_of_a_norm_is_a_number():
    for order in (None, "fro", float("nan")):
        with pytest.raises(ValueError, match="ord must be a number, got"):
            rx.linalg.vector_norm(X[0], ord=order)


def test_values_to_add_must_fit_their_places():
    with pytest.raises(
        ValueError, match=r"values must broadcast to the shape of x\[key\], \(2, 3\)"
    ):
        rx.index_add(X, ints(0, 1), ones(7))


WEIGHTS = [rx.nn.Parameter(np.ones(3))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rx.nn.Linear(3, 4, dtype="float31"), "dtype must be one of bool.*got 'float31'"),
        (lambda: rx.nn.Conv2d(3, 4, 3, dtype=7), "dtype must be one of bool.*got 7"),
        (lambda: rx.nn.BatchNorm(4, momentum="x"), r"momentum must lie in \(0, 1\], got 'x'"),
        (lambda: rx.nn.TransformerBlock(8, 2, mlp_ratio="x"), "mlp_ratio must be > 0, got 'x'"),
        (lambda: rx.nn.Fp8Linear(16, 16, margin=None), "margin must be at least 1.*got None"),
        (lambda: rx.nn.GRU(3, 4)(None), "x must be an array or Tensor, got None"),
        (lambda: rx.nn.LSTM(3, 4)("x"), "x must be an array or Tensor, got str"),
        (lambda: rx.nn.LSTM(3, 4)(ones()), r"x must have shape \(batch, time >= 1, 3\), got \(\)"),
        (lambda: rx.nn.GRU(3, 4)(np.ones((1, 2, 3), int)), "x must have a real floating.*int64"),
        (lambda: rx.nn.Flatten()(None), "x must be an array or Tensor, got NoneType"),
        (lambda: rx.optim.clip_grad_norm(WEIGHTS, "x"), "max_norm must be a number, got str"),
        (
            lambda: rx.optim.clip_grad_value(WEIGHTS, None),
            "max_value must be a number, got NoneType",
        ),
        (lambda: rx.optim.Adafactor(WEIGHTS, clip_threshold="x"), "clip_threshold must be > 0"),
        (lambda: rx.random.Generator(0).uniform(3, dtype="float31"), "dtype must be one of"),
    ],
)
def test_layers_and_optimizers_refuse_nonsense(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_attributes_that_other_objects_lack_stay_what_they_are():
    """A fault inside of an object that was given is not one of the arguments."""

    class Shy:
        def __getattr__(self, name):
            raise AttributeError(name, name=name, obj=self)

    @rx.custom_op
    def scaled(x, factor, *, bias=None):
        return x * factor.strength + (0 if bias is None else bias.shape)

    with pytest.raises(AttributeError, match="strength") as caught:
        scaled(np.ones(2), Shy())
    assert "scaled(x: float64 array" in caught.value.__notes__[0]

    @rx.custom_op
    def broken(x, *, bias=None):
        nothing = None
        return x * nothing.shape

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'shape'"):
        broken(np.ones(2), bias=None)


@pytest.mark.parametrize("dtype", [object, "U3", "M8[s]"])
def test_dtypes_that_are_no_numbers(dtype):
    with pytest.raises(TypeError, match="dtype must be of numbers or bools, got"):
        rx.asarray(5, dtype=dtype)


def test_integers_beyond_64_bits():
    with pytest.raises(OverflowError, match="obj must fit into an integer of 64 bits"):
        rx.asarray(2**70)
