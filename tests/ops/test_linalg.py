"""Linear algebra against NumPy and SciPy, its edge cases and refusals.

Gradients of first and second order are checked for every operation by the registry test.
"""

import inspect

import ml_dtypes
import numpy as np
import pytest
import scipy.linalg

import rtxarr as rx
from rtxarr import linalg
from rtxarr.testing import assert_close, gradcheck

few_in_dask = pytest.mark.skip_xp("dask.array", reason="dask has few decompositions")
DTYPES = ["float32", "float64", "complex64", "complex128"]
STACKS = [(), (2,), (2, 3), (0,)]


@pytest.fixture
def rng():
    return np.random.default_rng(17)


def random(rng, shape, dtype="float64"):
    values = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.standard_normal(shape)
    return np.asarray(values, dtype=dtype)


def host(x):
    return rx.Tensor(x).numpy()


def adjoint(x):
    return np.conj(np.swapaxes(x, -1, -2))


def close(actual, desired):
    # Decompositions lose a few bits to the condition of the matrix.
    single = any(name in str(actual.dtype) for name in ("float32", "complex64"))
    assert_close(actual, desired, rtol=2e-4 if single else 1e-11, atol=1e-4 if single else 1e-11)


def check_orthonormal(x):
    product = adjoint(x) @ x
    close(product, np.broadcast_to(np.eye(x.shape[-1]), product.shape))


# ------------------------------------------------------------------ values and dtypes


@few_in_dask
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_inverses_and_systems(xp, stack, dtype, rng):
    x = random(rng, (*stack, 3, 3), dtype) + 2 * np.eye(3, dtype=dtype)
    b = random(rng, (3, 2), dtype)
    inverse = linalg.inv(xp.asarray(x))
    assert inverse.dtype == xp.asarray(x).dtype
    close(inverse, np.linalg.inv(x))
    close(linalg.det(xp.asarray(x)), np.linalg.det(x))
    close(linalg.solve(xp.asarray(x), xp.asarray(b)), np.linalg.inv(x) @ b)
    close(linalg.solve(xp.asarray(x), xp.asarray(b[:, 0])), np.linalg.inv(x) @ b[:, 0])
    close(linalg.matrix_power(xp.asarray(x), -3), np.linalg.matrix_power(x, -3))
    sign, logabsdet = linalg.slogdet(xp.asarray(x))
    close(sign * xp.exp(logabsdet), np.linalg.det(x))
    assert xp.isdtype(logabsdet.dtype, "real floating")


@few_in_dask
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 3), (4, 2), (2, 4), (2, 3, 2), (1, 1), (2, 0, 3)], ids=str)
def test_factors_multiply_to_the_matrix(xp, shape, dtype, rng):
    x = random(rng, shape, dtype)
    k = min(shape[-2:])
    for full in (True, False):
        u, s, vh = linalg.svd(xp.asarray(x), full_matrices=full)
        assert u.shape[-1] == (shape[-2] if full else k)
        assert vh.shape[-2] == (shape[-1] if full else k)
        u, s, vh = (host(part) for part in (u, s, vh))
        close((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], x)
        check_orthonormal(u)
        assert np.all(np.diff(s, axis=-1) <= 0)
    close(linalg.svdvals(xp.asarray(x)), s)
    for mode in ("reduced", "complete"):
        q, r = (host(part) for part in linalg.qr(xp.asarray(x), mode=mode))
        assert q.shape[-1] == (k if mode == "reduced" else shape[-2])
        close(q @ r, x)
        close(np.tril(r, -1), np.zeros(r.shape))
        check_orthonormal(q)
    if k:
        close(linalg.pinv(xp.asarray(x)), np.linalg.pinv(x))


@few_in_dask
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_hermitian_factors(xp, stack, dtype, rng):
    x = random(rng, (*stack, 3, 3), dtype)
    x = x @ adjoint(x) + np.eye(3, dtype=dtype)
    for upper in (False, True):
        factor = host(linalg.cholesky(xp.asarray(x), upper=upper))
        assert factor.dtype == dtype
        close(adjoint(factor) @ factor if upper else factor @ adjoint(factor), x)
        close(np.tril(factor, -1) if upper else np.triu(factor, 1), np.zeros(x.shape))
    values, vectors = (host(part) for part in linalg.eigh(xp.asarray(x)))
    assert values.dtype == dtype.replace("complex64", "float32").replace("complex128", "float64")
    close((vectors * values[..., None, :]) @ adjoint(vectors), x)
    close(linalg.eigvalsh(xp.asarray(x)), values)


@few_in_dask
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_general_eigenvalues_are_complex(xp, stack, dtype, rng):
    x = random(rng, (*stack, 3, 3), dtype)
    values, vectors = (host(part) for part in linalg.eig(xp.asarray(x)))
    assert values.dtype == vectors.dtype == np.result_type(dtype, "complex64")
    close(x @ vectors, vectors * values[..., None, :])
    close(np.sort_complex(host(linalg.eigvals(xp.asarray(x)))), np.sort_complex(values))


def test_real_eigenvalues_are_complex_too():
    values, vectors = linalg.eig(np.diag([1.0, 2.0]))
    assert values.dtype == vectors.dtype == np.complex128
    assert linalg.eigvals(np.eye(2, dtype="float32")).dtype == np.complex64


def test_cholesky_and_determinant_agree_with_scipy(rng):
    x = rng.standard_normal((4, 4))
    close(linalg.det(x), scipy.linalg.det(x))
    close(linalg.pinv(x[:, :2]), scipy.linalg.pinv(x[:, :2]))
    x = x @ x.T
    close(linalg.cholesky(x), scipy.linalg.cholesky(x, lower=True))
    close(linalg.eigvalsh(x), scipy.linalg.eigvalsh(x))


@pytest.mark.parametrize("ord", [0, 1, 2, 3, 0.5, -1, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keepdims", [False, True], ids=["reduced", "kept"])
def test_vector_norm(xp, ord, dtype, keepdims, rng):
    x = random(rng, (2, 3, 4), dtype)
    for axis in (None, 1, -1, (0, 2), (2, 0)):
        out = linalg.vector_norm(xp.asarray(x), axis=axis, keepdims=keepdims, ord=ord)
        flat = np.abs(x)
        if axis is None:
            flat, place = flat.reshape(-1), 0
        elif isinstance(axis, tuple):
            flat, place = np.moveaxis(flat, axis, (0, 1)).reshape(-1, 3), 0
        else:
            place = axis
        expected = np.linalg.norm(flat, ord=ord, axis=place)
        axes = range(3) if axis is None else np.atleast_1d(axis) % 3
        shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
        close(out, expected.reshape(shape) if keepdims else expected)


@few_in_dask
@pytest.mark.parametrize("ord", ["fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matrix_norm(xp, ord, dtype, rng):
    x = random(rng, (2, 3, 4), dtype)
    expected = np.linalg.norm(x, ord=ord or "fro", axis=(-2, -1))
    close(linalg.matrix_norm(xp.asarray(x), ord=ord), expected)
    close(linalg.matrix_norm(xp.asarray(x), ord=ord, keepdims=True), expected[:, None, None])


@pytest.mark.parametrize("ord", ["fro", "nuc", 1, 2, np.inf])
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (2, 0, 3)], ids=str)
def test_norms_of_empty_matrices_are_zero(ord, shape):
    assert_close(linalg.matrix_norm(np.zeros(shape), ord=ord), np.zeros(shape[:-2]))


@few_in_dask
@pytest.mark.parametrize("dtype", DTYPES)
def test_matrix_rank_counts_what_is_not_negligible(xp, dtype, rng):
    x = random(rng, (4, 3), dtype)
    x[:, 2] = x[:, 0] + x[:, 1]
    stack = np.stack([x, np.zeros_like(x), np.eye(4, 3, dtype=dtype)])
    assert_close(linalg.matrix_rank(xp.asarray(stack)), np.array([2, 0, 3]))
    loose = linalg.matrix_rank(xp.asarray(np.diag([1.0, 0.1]).astype(dtype)), rtol=0.5)
    assert int(loose) == 1
    assert_close(linalg.matrix_rank(xp.zeros((2, 0, 3))), np.zeros(2, int))


@pytest.mark.parametrize("offset", [-4, -3, -2, -1, 0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (2, 3, 3), (0, 3), (2, 3, 0)], ids=str)
def test_diagonal_and_trace(xp, shape, offset, rng):
    x = random(rng, shape)
    out = linalg.diagonal(xp.asarray(x), offset=offset)
    assert_close(out, np.diagonal(x, offset, axis1=-2, axis2=-1))
    assert_close(linalg.trace(xp.asarray(x), offset=offset), np.trace(x, offset, -2, -1))


def test_trace_widens_integers():
    assert linalg.trace(np.eye(3, dtype="int8")).dtype == np.int64
    assert linalg.trace(np.eye(3, dtype="uint8")).dtype == np.uint64
    assert linalg.trace(np.eye(3, dtype="float32"), dtype=np.float64).dtype == np.float64


@pytest.mark.parametrize("k", [-4, -1, 0, 2, 5])
@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "complex64"])
def test_triangles(xp, k, dtype):
    x = np.arange(24).reshape(2, 3, 4).astype(dtype)
    assert_close(rx.tril(xp.asarray(x), k=k), np.tril(x, k), exact=True)
    assert_close(rx.triu(xp.asarray(x), k=k), np.triu(x, k), exact=True)


@few_in_dask
@pytest.mark.parametrize(
    ("shape1", "shape2", "axis"),
    [((3,), (3,), -1), ((2, 3), (3,), -1), ((3, 2), (4, 3, 2), -2), ((3, 2), (3, 2), 0),
     ((0, 3), (0, 3), -1)],
)  # fmt: skip
def test_cross(xp, shape1, shape2, axis, rng):
    x1, x2 = random(rng, shape1), random(rng, shape2)
    out = linalg.cross(xp.asarray(x1), xp.asarray(x2), axis=axis)
    a, b = (np.moveaxis(np.broadcast_to(x, out.shape), axis, 0) for x in (x1, x2))
    expected = np.stack([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2],
                         a[0] * b[1] - a[1] * b[0]])  # fmt: skip
    assert_close(out, np.moveaxis(expected, 0, axis))


def test_outer(xp, rng):
    x1, x2 = random(rng, (3,)), random(rng, (2,), "complex128")
    assert_close(linalg.outer(xp.asarray(x1), xp.asarray(x2)), np.outer(x1, x2))


@few_in_dask
@pytest.mark.parametrize("n", range(-2, 8))
def test_matrix_power(xp, n, rng):
    x = random(rng, (2, 3, 3))
    close(linalg.matrix_power(xp.asarray(x), n), np.linalg.matrix_power(x, n))


def test_matrix_power_zero_ignores_nan():
    assert_close(linalg.matrix_power(np.full((2, 2), np.nan), 0), np.eye(2))


# ------------------------------------------------------------------------- half types


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    ["cholesky", "det", "eigh", "eigvalsh", "inv", "matrix_norm", "pinv", "qr", "slogdet", "svd",
     "svdvals", "vector_norm"],
)  # fmt: skip
def test_half_precision_is_rounded_once(name, dtype, rng):
    x = rng.standard_normal((3, 3))
    x = (x @ x.T + 2 * np.eye(3)).astype(dtype)
    function = getattr(linalg, name)
    out, single = function(x), function(x.astype("float32"))
    if not isinstance(out, tuple):
        out, single = (out,), (single,)
    for got, want in zip(out, single, strict=True):
        assert got.dtype == dtype
        assert_close(got, want.astype(dtype), exact=True)
    tensor = rx.Tensor(x, requires_grad=True)
    rx.sum(function(tensor)[-1] if len(out) > 1 else function(tensor)).backward()
    assert tensor.grad.dtype == dtype


def test_half_precision_meets_single():
    x = 2 * np.eye(2, dtype="float16")
    assert linalg.solve(x, np.ones(2, "float32")).dtype == np.float32
    assert linalg.solve(x, np.ones(2, "float16")).dtype == np.float16
    assert linalg.eig(x)[0].dtype == np.complex64


# -------------------------------------------------------------------------- gradients


@few_in_dask
@pytest.mark.parametrize("name", ["inv", "det", "svdvals", "pinv", "qr", "eigh", "slogdet", "eig"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_gradients_are_the_same_over_every_library(xp, name, dtype, rng):
    def gradient(module):
        tensor = rx.Tensor(module.asarray(x), requires_grad=True)
        out = getattr(linalg, name)(tensor)
        total = 0
        for part in out if isinstance(out, tuple) else [out]:
            total = total + rx.sum(rx.abs(part) ** 2)
        total.backward()
        return host(tensor.grad)

    x = random(rng, (2, 3, 3), dtype)
    x = x @ adjoint(x)
    close(gradient(xp), gradient(np))


@pytest.mark.parametrize("ord", [0, 1, 2, 3, 0.5, 1.5, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_norm_of_zeros_has_gradient_zero(ord, dtype):
    x = np.zeros((2, 3), dtype)
    tensor = rx.Tensor(x, requires_grad=True)
    rx.sum(linalg.vector_norm(tensor, axis=1, ord=ord) + rx.sum(rx.abs(tensor))).backward()
    assert_close(tensor.grad, np.zeros_like(x))
    if ord == 2:
        hessian = rx.hessian(lambda t: rx.sum(linalg.vector_norm(t, axis=1)))
        assert_close(hessian(np.zeros((2, 3))), np.zeros((2, 3, 2, 3)))


def test_largest_elements_share_the_gradient_of_the_maximum_norm():
    g = rx.grad(lambda x: linalg.vector_norm(x, ord=np.inf))(np.array([2.0, -2.0, 1.0]))
    assert_close(g, [0.5, -0.5, 0.0])


def test_gradient_of_a_singular_determinant_is_the_matrix_of_cofactors():
    for x, cofactors in (
        ([[0.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [-1.0, 0.0]]),
        ([[1.0, 2.0], [2.0, 4.0]], [[4.0, -2.0], [-2.0, 1.0]]),
        (np.zeros((2, 2)), np.zeros((2, 2))),
        (np.zeros((3, 3)), np.zeros((3, 3))),
        (np.arange(9.0).reshape(3, 3), [[-3.0, 6.0, -3.0], [6.0, -12.0, 6.0], [-3.0, 6.0, -3.0]]),
    ):
        assert_close(rx.grad(linalg.det)(np.asarray(x)), cofactors, atol=1e-13)


def test_gradient_of_a_singular_slogdet_is_nan_and_does_not_raise():
    stack = np.stack([np.eye(2), np.zeros((2, 2))])
    g = rx.grad(lambda x: rx.sum(linalg.slogdet(x).logabsdet))(stack)
    assert_close(g[0], np.eye(2))
    assert np.all(np.isnan(g[1]))


def test_equal_values_are_fine_until_their_vectors_are_asked_for():
    eye = np.eye(3)
    assert_close(rx.grad(lambda x: rx.sum(linalg.eigvalsh(x) ** 2))(eye), 2 * eye)
    assert_close(rx.grad(lambda x: rx.sum(linalg.eigh(x).eigenvalues ** 2))(eye), 2 * eye)
    assert_close(rx.grad(lambda x: linalg.matrix_norm(x, ord="nuc"))(eye), eye)
    assert_close(rx.grad(lambda x: linalg.matrix_norm(x, ord=2))(eye), eye / 3)
    g = rx.grad(lambda x: rx.sum(linalg.eigh(x).eigenvectors ** 3))(eye)
    assert np.all(np.isnan(g[~np.eye(3, dtype=bool)]))


def test_pinv_differentiates_matrices_of_low_rank(rng):
    left, right = rng.standard_normal((4, 2)), rng.standard_normal((2, 3))
    gradcheck(lambda a, b: linalg.pinv(a @ b, rtol=1e-8), (left, right))


def test_only_one_output_may_be_used(rng):
    x = rng.standard_normal((4, 3))
    for function in (
        lambda x: linalg.svd(x).S,
        lambda x: rx.abs(linalg.svd(x, full_matrices=False).U),
        lambda x: rx.abs(linalg.svd(x, full_matrices=False).Vh),
        lambda x: linalg.qr(x).Q,
        lambda x: linalg.qr(x).R,
        lambda x: linalg.slogdet(x[:3]).logabsdet,
        lambda x: linalg.slogdet(x[:3]).sign,
        lambda x: rx.abs(linalg.eigh(_symmetric(x)).eigenvectors),
    ):
        gradcheck(function, (x,))


def _symmetric(x):
    return x[:3] + rx.matrix_transpose(x[:3])


@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0), (0, 2, 2)], ids=str)
def test_gradients_of_nothing_have_its_shape(shape):
    for name in ("inv", "det", "svdvals", "pinv", "eigvalsh"):
        tensor = rx.Tensor(np.zeros(shape), requires_grad=True)
        rx.sum(getattr(linalg, name)(tensor)).backward()
        assert tensor.grad.shape == shape


# ------------------------------------------------------------------ results, refusals


@pytest.mark.parametrize(
    ("name", "fields"),
    [("eigh", ("eigenvalues", "eigenvectors")), ("eig", ("eigenvalues", "eigenvectors")),
     ("qr", ("Q", "R")), ("slogdet", ("sign", "logabsdet")), ("svd", ("U", "S", "Vh"))],
)  # fmt: skip
def test_results_have_names(name, fields):
    for x in (np.eye(2), rx.Tensor(np.eye(2)), rx.Tensor(np.eye(2), requires_grad=True)):
        out = getattr(linalg, name)(x)
        assert out._fields == fields
        assert all(isinstance(part, rx.Tensor) == isinstance(x, rx.Tensor) for part in out)


@pytest.mark.parametrize(
    "name", ["inv", "det", "slogdet", "cholesky", "eigh", "eigvalsh", "eig", "eigvals"]
)
def test_square_matrices_are_asked_for(name):
    function = getattr(linalg, name)
    for x in (np.ones((2, 3)), rx.Tensor(np.ones((2, 3)))):
        with pytest.raises(ValueError, match=r"x must be square .*, got shape \(2, 3\)"):
            function(x)
    with pytest.raises(ValueError, match=r"x must have at least two dimensions, got shape \(2,\)"):
        function(np.ones(2))


@pytest.mark.parametrize(
    "name", ["pinv", "qr", "svd", "svdvals", "matrix_rank", "matrix_norm", "diagonal", "trace"]
)
def test_matrices_are_asked_for(name):
    with pytest.raises(ValueError, match=r"x must have at least two dimensions, got shape \(2,\)"):
        getattr(linalg, name)(np.ones(2))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: linalg.solve(np.eye(3), np.ones(2)), ValueError, r"x2 must have 3 rows .*\(2,\)"),
        (lambda: linalg.solve(np.eye(3), np.ones((3, 2, 2))), ValueError, "x2 must have 3 rows"),
        (lambda: linalg.solve(np.ones((2, 3)), np.ones(3)), ValueError, "x1 must be square"),
        (lambda: linalg.cross(np.ones(3), np.ones(2)), ValueError, "x2 must have length 3 along"),
        (lambda: linalg.cross(np.ones((3, 3)), np.ones(3), axis=0), ValueError, "must be negative"),
        (lambda: linalg.outer(np.ones((2, 2)), np.ones(2)), ValueError, "x1 must have one dim"),
        (lambda: linalg.qr(np.eye(2), mode="raw"), ValueError, "mode must be 'reduced' or"),
        (lambda: linalg.matrix_norm(np.eye(2), ord=3), ValueError, "ord must be 'fro'.*got 3"),
        (lambda: linalg.vector_norm(np.ones(2), ord="fro"), ValueError, "ord must be a number"),
        (lambda: linalg.vector_norm(np.ones(2), axis=1), ValueError, "axis must lie in"),
        (lambda: linalg.matrix_power(np.eye(2), 0.5), TypeError, "n must be an int, got float"),
        (lambda: rx.tril(np.ones(2)), ValueError, "x must have at least two dimensions"),
        (lambda: rx.triu(np.eye(2), k=0.5), TypeError, "k must be an int, got float"),
        (lambda: linalg.pinv(np.eye(2), rtol=np.nan), ValueError, "rtol must be at least 0, got"),
        (lambda: linalg.matrix_rank(np.eye(2), rtol="0"), TypeError, "rtol must be a number"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_every_function_of_the_standard_is_there():
    import array_api_strict

    for name in array_api_strict.linalg.__all__:
        if name.endswith("Result"):
            continue
        theirs = inspect.signature(getattr(array_api_strict.linalg, name)).parameters
        ours = inspect.signature(getattr(linalg, name)).parameters
        assert list(ours) == list(theirs)
        assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]
        assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


# ------------------------------------------------------------------------ comparisons


def _squares(function):
    """Make real numbers of every output that do not depend on signs and phases."""

    def call(x):
        out = function(x)
        return [abs(part) ** 2 for part in (out if isinstance(out, tuple) else [out])]

    return call


@pytest.mark.compare
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("inv", (2, 3, 3), {}), ("det", (2, 3, 3), {}), ("slogdet", (2, 3, 3), {}),
        ("pinv", (4, 2), {}), ("pinv", (2, 4), {}), ("pinv", (2, 3, 3), {}),
        ("eig", (2, 3, 3), {}), ("eigvals", (3, 3), {}),
        ("cholesky", (2, 3, 3), {}), ("cholesky", (3, 3), {"upper": True}),
        ("eigh", (2, 3, 3), {}), ("eigvalsh", (3, 3), {}),
        ("qr", (3, 3), {}), ("qr", (2, 4, 2), {}), ("qr", (2, 4), {}),
        ("svd", (3, 3), {}), ("svd", (4, 2), {"full_matrices": False}),
        ("svd", (2, 2, 4), {"full_matrices": False}), ("svdvals", (4, 3), {}),
        ("matrix_power", (3, 3), {"n": -3}),
        *(("vector_norm", (3, 4), {"ord": ord}) for ord in (1, 2, 3, 0.5, -1, np.inf, -np.inf)),
        *(("matrix_norm", (2, 3, 4), {"ord": ord})
          for ord in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)),
    ],
    ids=str,
)  # fmt: skip
def test_values_and_gradients_agree_with_torch(name, shape, options, dtype, rng):
    import torch

    x = random(rng, shape, dtype)
    if name in ("cholesky", "eigh", "eigvalsh"):
        x = x @ adjoint(x)
    arguments = options.values() if name == "matrix_power" else ()
    keywords = {} if arguments else options
    ours, theirs = rx.Tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
    outs = _squares(lambda t: getattr(linalg, name)(t, *arguments, **keywords))(ours)
    expected = _squares(lambda t: getattr(torch.linalg, name)(t, *arguments, **keywords))(theirs)
    weights = [rng.standard_normal(out.shape) for out in outs]
    if name in ("eig", "eigvals"):  # LAPACK may order them otherwise
        weights = [np.ones(out.shape) for out in outs]
    total, expected_total = 0, 0
    for out, want, weight in zip(outs, expected, weights, strict=True):
        if name not in ("eig", "eigvals"):
            close(out, want.detach().numpy())
        total = total + rx.sum(out * weight)
        expected_total = expected_total + (want * torch.tensor(weight)).sum()
    total.backward()
    expected_total.backward()
    close(ours.grad, theirs.grad.resolve_conj().numpy())


@pytest.mark.compare
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize(
    ("shape1", "shape2"), [((3, 3), (3,)), ((3, 3), (3, 2)), ((2, 3, 3), (2, 3, 2))], ids=str
)
def test_solve_agrees_with_torch(shape1, shape2, dtype, rng):
    import torch

    arrays = random(rng, shape1, dtype), random(rng, shape2, dtype)
    ours = [rx.Tensor(a, requires_grad=True) for a in arrays]
    theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
    out, expected = linalg.solve(*ours), torch.linalg.solve(*theirs)
    close(out, expected.detach().numpy())
    rx.sum(rx.abs(out) ** 2).backward()
    (expected.abs() ** 2).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        close(a.grad, b.grad.resolve_conj().numpy())
