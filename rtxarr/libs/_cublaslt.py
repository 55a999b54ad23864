"""cuBLASLt through nvmath's bindings: plans kept by problem, a handle a device, workspaces.

The library counts columns first, so a product of row-major arrays is handed over as that of their
transposes: its A is our ``b`` and its B is our ``a``.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from typing import Any

import numpy as np

from rtxarr import _kernel_cache
from rtxarr.libs._layout import Copies, Matrix, SplitsOnly, Unsupported, describe

__all__ = ["WORKSPACE_BYTES", "CublasLt", "autotuning"]

WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper
_MIN_VERSION = 120000
# With these, a split of K that leaves a rest can lose part of the sum.
_BROKEN_SPLITS = range(120602, 130800)
_MAX_PLANS = 4096
_MAX_WORKSPACES = 64  # streams, on all devices

# cudaDataType, cublasComputeType_t and cublasStatus_t.
TYPES = {
    "float32": 0, "float64": 1, "float16": 2, "bfloat16": 14, "complex64": 4, "complex128": 5,
}  # fmt: skip
FP8_TYPES = {"e4m3": 28, "e5m2": 29}
_COMPUTE = {
    "float32": (68, 0), "float64": (70, 1), "float16": (68, 0), "bfloat16": (68, 0),
    "complex64": (68, 4), "complex128": (70, 5),
}  # fmt: skip
_COMPUTE_TF32 = (77, 0)
_REFUSALS = (7, 15)  # invalid value, not supported: nothing was started

# cublasLtEpilogue_t, by name.
DEFAULT = 1
RELU, GELU = 2, 32
BIAS = 4
AUX = 128  # added to RELU and GELU
DRELU, DGELU = 136, 192
BGRAD = 16  # added to DRELU and DGELU
BGRADB = 512  # of their B, our ``a``

# cublasLtMatmulDescAttributes_t.
BIAS_POINTER, AUX_POINTER = 8, 11
A_SCALE_POINTER, B_SCALE_POINTER = 17, 18
_TRANSA, _TRANSB, _EPILOGUE, _AUX_LD, _FAST_ACCUM = 3, 4, 7, 12, 25
_A_SCALE_MODE, _B_SCALE_MODE = 31, 32
_OUTER_VEC_32F = 3
# cublasLtMatrixLayoutAttribute_t, cublasLtMatmulPreferenceAttributes_t, ...AlgoConfigAttributes_t.
_BATCH_COUNT, _BATCH_STEP = 5, 6
_MAX_WORKSPACE, _REDUCTION_SCHEMES, _MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_ALGO_ID, _SPLIT_K = 0, 2

_RESULT = np.dtype(
    [("algo", "u8", 8), ("workspace", "u8"), ("state", "i4"), ("waves", "f4"), ("rest", "i4", 4)]
)
_SCALARS = {TYPES[name]: name for name in ("float32", "float64", "complex64", "complex128")}

_NO_TURN = contextlib.nullcontext()

# Whether new plans time the candidates; a list, to be seen by all threads.
autotuning = [False]


class _Plan:
    """All of one product that stays the same from call to call."""

    __slots__ = (
        "_owned", "a", "algo", "alpha", "b", "beta", "candidates", "desc", "digest", "dtype",
        "given", "lock", "offsets", "out", "results", "scalars", "shape", "slot", "slot_address",
        "workspace",
    )  # fmt: skip

    a: int  # layouts and descriptor of the library
    b: int
    out: int
    desc: int
    alpha: int  # addresses
    beta: int
    scalars: np.ndarray  # where they are
    algo: int
    workspace: int  # bytes
    offsets: tuple
    shape: tuple
    dtype: np.dtype
    results: np.ndarray  # of the heuristics
    digest: str

    def __init__(self) -> None:
        self._owned: list = []
        self.lock = threading.Lock()  # between setting a pointer and starting
        self.slot = np.zeros(1, np.int64)
        self.slot_address = self.slot.ctypes.data
        self.given: tuple | None = ()  # the pointers that ``desc`` has
        self.candidates: Any = None

    def own(self, handle: int, destroy: Any) -> int:
        self._owned.append((destroy, handle))
        return handle

    def choose(self, i: int) -> None:
        """Use one of ``results``."""
        self.algo = _address(self.results, i)
        self.workspace = int(self.results["workspace"][i])

    def __del__(self) -> None:
        for destroy, handle in self._owned:
            destroy(handle)


class CublasLt:
    """The loaded library, bound to CuPy.

    Raises
    ------
    ImportError
        When nvmath-python is not installed.
    RuntimeError
        When the library is not found, or too old.
    """

    def __init__(self, cupy: Any) -> None:
        import nvmath
        from nvmath.bindings import cublasLt

        number = cublasLt.get_version()
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        if number < _MIN_VERSION:
            raise RuntimeError(f"cuBLASLt {self.version} is older than 12.0")
        self.bindings_version = nvmath.__version__
        self._splits_are_broken = number in _BROKEN_SPLITS
        self._lt = cublasLt
        self._matmul = cublasLt.matmul
        self._set = cublasLt.matmul_desc_set_attribute
        self._error = cublasLt.cuBLASLtError
        self._cupy = cupy
        self.array = cupy.ndarray
        self.empty = cupy.ndarray  # makes arrays, where `array` tells them
        self.may_share_memory = cupy.may_share_memory
        self._current_device = cupy.cuda.runtime.getDevice
        self._current_stream = cupy.cuda.get_current_stream
        self._handles: dict[int, int] = {}
        self._plans: dict[tuple, _Plan | Copies | Unsupported] = {}
        self._workspaces: dict[tuple, Any] = {}
        self._lock = threading.RLock()
        self.thread = threading.local()

    def __repr__(self) -> str:
        return f"cuBLASLt {self.version}, through nvmath-python {self.bindings_version}"

    # ------------------------------------------------------------------------ running

    def run(
        self,
        a: Any,
        b: Any,
        recipe: tuple,
        out: Any = None,
        pointers: tuple = (),
        *,
        addend: Any = None,
        copied: bool = False,
    ) -> Any:
        """Return ``a @ b`` with the epilogue of ``recipe``, written to ``out`` if given.

        Parameters
        ----------
        a, b : CuPy array
        recipe : tuple
            From :func:`recipe`.
        out : CuPy array, optional
            Of the right shape and dtype, and sharing no memory with the operands.
        pointers : tuple of (int, int)
            Attributes of the descriptor with the addresses that they get in this call.
        addend : CuPy array, optional
            What is added to the product, where ``recipe`` says so: contiguous, and of the shape
            and dtype of the result.

        Raises
        ------
        Unsupported
            Before anything is written, when cuBLASLt cannot do this product.
        """
        device_id = self._current_device()
        a_memory, b_memory = a.data, b.data
        a_pointer, b_pointer = a_memory.ptr, b_memory.ptr
        address = a_pointer | b_pointer | 256
        for _, pointer in pointers:
            address |= pointer
        out_key = None
        if out is not None:
            out_key = out.strides
            address |= out.data.ptr
            if out.data.device_id != device_id:
                raise Unsupported("an array that is not on the current device")
        if addend is not None:
            address |= addend.data.ptr
            if addend.data.device_id != device_id:
                raise Unsupported("an array that is not on the current device")
            if not addend.flags.c_contiguous:
                raise Unsupported("an addend with gaps")
        key = (
            (device_id, a_memory.device_id, b_memory.device_id),
            recipe, a.dtype, b.dtype, a.shape, a.strides, b.shape, b.strides, out_key,
            address & -address,
        )  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            plan = self._new_plan(key, pointers)
        if isinstance(plan, Unsupported):
            raise type(plan)(str(plan))
        if isinstance(plan, Copies):
            if copied:
                raise Unsupported("rows more than 2 GiB apart")
            a, b = (
                self._cupy.ascontiguousarray(x) if copy else x
                for x, copy in zip((a, b), plan, strict=True)
            )
            return self.run(a, b, recipe, out, pointers, addend=addend, copied=True)

        thread = self.thread
        if getattr(thread, "device_id", None) != device_id:
            # Makes the device's context this thread's; CuPy does so only when it needs it.
            self._cupy.cuda.runtime.setDevice(device_id)
            thread.device_id = device_id
        if out is None:
            result = self.empty(plan.shape, plan.dtype)
        else:
            result = out
            _check_fits("out", out, plan)
        stream = self._current_stream()
        out_pointer = addend_pointer = result.data.ptr
        if addend is not None:
            _check_fits("addend", addend, plan)
            addend_pointer = addend.data.ptr
        memory = (a_pointer, b_pointer, out_pointer, addend_pointer)
        try:
            if plan.candidates is not None:
                self._tune(plan, device_id, stream, memory, pointers)
            if pointers:
                with plan.lock:
                    self._start(plan, device_id, stream.ptr, memory, pointers)
            else:
                self._start(plan, device_id, stream.ptr, memory, pointers)
        except self._error as error:
            if getattr(error, "status", None) not in _REFUSALS:
                raise RuntimeError(f"cuBLASLt failed: {error}") from error
            reason = f"refused when started: {error}"
            self._plans[key] = Unsupported(reason)
            raise Unsupported(reason) from None
        return result

    def _start(self, plan, device_id, stream, memory, pointers):
        a_pointer, b_pointer, out_pointer, addend_pointer = memory
        desc = plan.desc
        if pointers != plan.given:  # those of parameters stay
            plan.given = None
            for attribute, pointer in pointers:
                plan.slot[0] = pointer
                self._set(desc, attribute, plan.slot_address, 8)
            plan.given = pointers
        size = plan.workspace
        workspace, turn = self.workspace(device_id, stream) if size else (0, _NO_TURN)
        handle = self._handles[device_id]
        with turn:
            for a_offset, b_offset, out_offset in plan.offsets:
                to = out_pointer + out_offset
                self._matmul(
                    handle, desc, plan.alpha, b_pointer + b_offset, plan.b, a_pointer + a_offset,
                    plan.a, plan.beta, addend_pointer + out_offset, plan.out, to, plan.out,
                    plan.algo, workspace, size, stream,
                )  # fmt: skip

    def prepare(self) -> None:
        """Create what the current device and stream need, so that a capture creates nothing."""
        device_id = self._current_device()
        self.handle(device_id)
        self.workspace(device_id, self._current_stream().ptr)

    def handle(self, device_id: int) -> int:
        """Return the handle of a device, the current one."""
        with self._lock:
            if device_id not in self._handles:
                self._cupy.cuda.runtime.setDevice(device_id)
                self._handles[device_id] = self._lt.create()
            return self._handles[device_id]

    def workspace(self, device_id: int, stream: int) -> tuple[int, Any]:
        """Return the address of ``WORKSPACE_BYTES`` bytes that only this stream uses.

        And what a product holds while it is started: its kernels leave results there for one
        another, so those of other threads must not come between them.
        """
        own = getattr(self.thread, "workspace", None)
        if own is not None:
            return own, _NO_TURN
        # Handle 2 means another stream in each thread.
        key = (device_id, stream, threading.get_ident() if stream == 2 else 0)
        found = self._workspaces.get(key)
        if found is None:
            with self._lock:
                found = self._workspaces.get(key)
                if found is None:
                    if len(self._workspaces) >= _MAX_WORKSPACES:
                        raise Unsupported(f"more than {_MAX_WORKSPACES} streams")
                    # Kept for good: a captured graph may hold the address. From the default pool,
                    # so that it belongs to no graph.
                    pool = self._cupy.get_default_memory_pool()
                    found = self._workspaces[key] = pool.malloc(WORKSPACE_BYTES), threading.Lock()
        memory, turn = found
        return memory.ptr, turn

    # ----------------------------------------------------------------------- planning

    def refusal(self, a: tuple, b: tuple, recipe: tuple, attributes: tuple[int, ...] = ()) -> str:
        """Return why a product of well-aligned operands would not run; "" if it would.

        ``a`` and ``b`` are (dtype, shape, strides in bytes); ``attributes`` are those of
        ``pointers``.
        """
        device_id = self._current_device()
        kinds = (a[0], b[0], a[1], a[2], b[1], b[2])
        key = ((device_id,) * 3, recipe, *kinds, None, 256)
        plan = self._plans.get(key) or self._new_plan(key, tuple((x, 0) for x in attributes))
        if isinstance(plan, Unsupported):
            return str(plan) or "there is nothing to multiply"
        return "an operand would be copied" if isinstance(plan, Copies) else ""

    def n_plans(self) -> int:
        return sum(type(plan) is _Plan for plan in self._plans.values())

    def _new_plan(self, key, pointers):
        with self._lock:
            if key in self._plans:
                return self._plans[key]
            try:
                plan = self._make(key, pointers)
            except Unsupported as reason:
                plan = type(reason)(str(reason))  # without the frames it came through
            if len(self._plans) >= _MAX_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan
            return plan

    def _make(self, key, pointers):
        devices, recipe, *operands, out_strides, alignment = key
        a_dtype, b_dtype, a_shape, a_strides, b_shape, b_strides = operands
        epilogue, out_dtype, tf32, aux_ld, fp8, unsplit, scale, adds = recipe
        if len(set(devices)) > 1:
            raise Unsupported("an array that is not on the current device")
        if fp8 is None:
            name = a_dtype.name
            if a_dtype != b_dtype or name not in TYPES:
                raise Unsupported(f"dtypes {a_dtype} and {b_dtype}")
            compute = _COMPUTE_TF32 if tf32 and name == "float32" else _COMPUTE[name]
            kinds = TYPES[name], TYPES[name]
            out_dtype = out_dtype or a_dtype
        else:
            compute, kinds = _COMPUTE["float32"], fp8[:2]
        product = describe(
            a_shape, a_strides, b_shape, b_strides, a_dtype.itemsize,
            out_strides=out_strides, out_itemsize=out_dtype.itemsize,
        )  # fmt: skip
        if isinstance(product, Copies):
            return product
        if fp8 is not None:
            _check_fp8(product, alignment)
        if epilogue & (AUX | BGRAD | BGRADB) and (product.batch, len(product.offsets)) != (1, 1):
            raise Unsupported("stacks, with an auxiliary result")
        if epilogue == BGRADB and product.m == 1:
            raise Unsupported("")  # a sum over all of a vector: not worth a word
        if epilogue == BGRADB and not product.a.transposed:
            raise Unsupported("a bias gradient of an operand that is not transposed")

        plan = _Plan()
        plan.scalars = np.array([scale, adds], _SCALARS[compute[1]])
        plan.alpha = plan.scalars.ctypes.data
        plan.beta = plan.alpha + plan.scalars.itemsize
        plan.shape, plan.dtype = product.shape, out_dtype
        sizes = (a_dtype.itemsize, b_dtype.itemsize, out_dtype.itemsize)
        plan.offsets = tuple(
            tuple(n * size for n, size in zip(offset, sizes, strict=True))
            for offset in product.offsets
        )
        for offset in plan.offsets:
            for n in offset:
                alignment |= n
        alignment &= -alignment
        self._describe(plan, product, compute, kinds, TYPES[out_dtype.name])
        set_ = self._set_attribute
        set_(self._set, plan.desc, _EPILOGUE, np.uint32(epilogue))
        if aux_ld:
            set_(self._set, plan.desc, _AUX_LD, np.int64(aux_ld))
        if fp8 is not None:
            _, _, by_row, fast = fp8
            set_(self._set, plan.desc, _FAST_ACCUM, np.int8(fast))
            if by_row:
                set_(self._set, plan.desc, _A_SCALE_MODE, np.int32(_OUTER_VEC_32F))
                set_(self._set, plan.desc, _B_SCALE_MODE, np.int32(_OUTER_VEC_32F))
        for attribute, _ in pointers:
            # The heuristics do not read there, but count on the alignment that they see.
            set_(self._set, plan.desc, attribute, np.int64(alignment))
        self._choose(plan, devices[0], key, product.k, alignment, unsplit)
        return plan

    def _describe(self, plan, product, compute, kinds, out_kind):
        """Make the descriptors of the product and of its three matrices."""
        lt = self._lt
        p = product
        plan.desc = plan.own(lt.matmul_desc_create(*compute), lt.matmul_desc_destroy)
        self._set_attribute(self._set, plan.desc, _TRANSA, np.int32(p.b.transposed))
        self._set_attribute(self._set, plan.desc, _TRANSB, np.int32(p.a.transposed))
        layouts = []
        for kind, (rows, cols), matrix, step in (
            (kinds[0], (p.m, p.k), p.a, p.steps[0]),
            (kinds[1], (p.k, p.n), p.b, p.steps[1]),
            (out_kind, (p.m, p.n), Matrix(False, p.ld), p.steps[2]),
        ):
            # As they lie: the length of what is contiguous comes first.
            lengths = (rows, cols) if matrix.transposed else (cols, rows)
            layout = plan.own(
                lt.matrix_layout_create(kind, *lengths, matrix.ld), lt.matrix_layout_destroy
            )
            if p.batch > 1:
                set_layout = lt.matrix_layout_set_attribute
                self._set_attribute(set_layout, layout, _BATCH_COUNT, np.int32(p.batch))
                self._set_attribute(set_layout, layout, _BATCH_STEP, np.int64(step))
            layouts.append(layout)
        plan.a, plan.b, plan.out = layouts

    @staticmethod
    def _set_attribute(function, descriptor, attribute, value):
        value = np.asarray(value)
        function(descriptor, attribute, value.ctypes.data, value.nbytes)

    def _choose(self, plan, device_id, key, k, alignment, unsplit):
        """Take the first algorithm that the library names, or the one timed before."""
        handle = self.handle(device_id)
        layouts = (plan.b, plan.a, plan.out, plan.out)
        try:
            found = self._ask(plan, handle, layouts, alignment, unsplit)
            usable = [i for i in found if self._is_sound(_address(plan.results, i), k)]
        except self._error as error:
            raise Unsupported(
                f"no algorithm for {key[2]} with epilogue {key[1][0]} ({error})"
            ) from None
        if not found:
            raise Unsupported(f"no algorithm for {key[2]} with epilogue {key[1][0]}")
        if not usable:
            # Those that do not split are a hundred times slower.
            raise SplitsOnly("only algorithms that may lose part of a sum")
        plan.choose(usable[0])
        if autotuning[0]:
            name = self._cupy.cuda.runtime.getDeviceProperties(device_id)["name"]
            known = repr(("cublasLt", self.version, name, key[1:]))
            plan.digest = hashlib.sha256(known.encode()).hexdigest()
            kept = _kernel_cache.load(plan.digest)
            if kept is None:
                plan.candidates = usable
            else:
                self._restore(plan, handle, layouts, kept[1], k)

    def _ask(self, plan, handle, layouts, alignment, unsplit):
        """Ask the library for algorithms, and say which of ``plan.results`` hold one."""
        lt = self._lt
        preferences = [(_MAX_WORKSPACE, np.uint64(WORKSPACE_BYTES))]
        preferences += [(attribute, np.uint32(alignment)) for attribute in _MIN_ALIGNMENTS]
        if unsplit:
            preferences.append((_REDUCTION_SCHEMES, np.uint32(0)))
        plan.results = np.zeros(8, _RESULT)
        count = np.zeros(1, np.int32)
        preference = lt.matmul_preference_create()
        try:
            for attribute, value in preferences:
                self._set_attribute(
                    lt.matmul_preference_set_attribute, preference, attribute, value
                )
            lt.matmul_algo_get_heuristic(
                handle, plan.desc, *layouts, preference, len(plan.results),
                plan.results.ctypes.data, count.ctypes.data,
            )  # fmt: skip
        finally:
            lt.matmul_preference_destroy(preference)
        return [i for i in range(int(count[0])) if plan.results["state"][i] == 0]

    def _is_sound(self, algo, k):
        """Tell whether this library version computes the whole sum with this algorithm."""
        if not self._splits_are_broken:
            return True
        value, written = np.zeros(1, np.int32), np.zeros(1, np.uint64)
        found = []
        for attribute in (_ALGO_ID, _SPLIT_K):
            self._lt.matmul_algo_config_get_attribute(
                algo, attribute, value.ctypes.data, value.nbytes, written.ctypes.data
            )
            found.append(int(value[0]))
        algo_id, n_splits = found
        return algo_id != 66 or n_splits <= 1 or k % n_splits == 0

    # ------------------------------------------------------------------------- tuning

    def _restore(self, plan, handle, layouts, content, k):
        """Use an algorithm from disk, if the library still takes it."""
        result = np.zeros(1, _RESULT)
        algo = np.frombuffer(content, np.uint64).copy()
        if algo.size != 8:
            return
        try:
            self._lt.matmul_algo_check(
                handle, plan.desc, *layouts, algo.ctypes.data, result.ctypes.data
            )
        except self._error:
            return
        # The check fills in all but the algorithm itself.
        result["algo"] = algo
        usable = result["state"][0] == 0 and result["workspace"][0] <= WORKSPACE_BYTES
        if usable and self._is_sound(_address(result, 0), k):
            plan.results = result
            plan.choose(0)

    def _tune(self, plan, device_id, stream, memory, pointers):
        """Time the candidates on the caller's arrays, and keep the fastest on disk too."""
        if stream.is_capturing():
            return
        with plan.lock:
            if plan.candidates is None:
                return
            best, fastest = plan.candidates[0], float("inf")
            event = self._cupy.cuda.Event
            for candidate in plan.candidates:
                plan.choose(candidate)
                start, stop = event(), event()
                try:
                    self._start(plan, device_id, stream.ptr, memory, pointers)
                    start.record(stream)
                    for _ in range(5):
                        self._start(plan, device_id, stream.ptr, memory, pointers)
                    stop.record(stream)
                except self._error:
                    continue
                stop.synchronize()
                elapsed = self._cupy.cuda.get_elapsed_time(start, stop)
                if elapsed < fastest:
                    best, fastest = candidate, elapsed
            plan.choose(best)
            plan.candidates = None
            _kernel_cache.store(plan.digest, "cublasLt", plan.results["algo"][best].tobytes())


def _address(results, i):
    """Where the algorithm of a result lies: it comes first in it."""
    return results.ctypes.data + i * results.itemsize


def recipe(
    epilogue: int = DEFAULT,
    *,
    dtype: Any = None,
    tf32: bool = False,
    aux_ld: int = 0,
    fp8: tuple | None = None,
    unsplit: bool = False,
    scale: float = 1.0,
    adds: bool = False,
) -> tuple:
    """Return what distinguishes two products of operands that lie alike.

    Parameters
    ----------
    epilogue : int
    dtype : NumPy dtype, optional
        Of the result; that of the operands by default.
    tf32 : bool
        Whether float32 operands may be rounded to TF32.
    aux_ld : int
        Elements (bits, for ReLU) between rows of the auxiliary array.
    fp8 : (int, int, bool, bool), optional
        Types of the operands, whether each row has its scale, whether to accumulate fast.
    unsplit : bool
        Whether no algorithm may split the sum (split-K), which makes long ones slow.
    scale : float
        What the product is multiplied by, before anything else.
    adds : bool
        Whether an array is then added.
    """
    return (epilogue, dtype, tf32, aux_ld, fp8, unsplit, scale, adds)


def _check_fits(name, x, plan):
    if x.shape != plan.shape or x.dtype != plan.dtype:
        raise ValueError(
            f"{name} must be {plan.dtype} of shape {plan.shape}, got {x.dtype} of shape {x.shape}"
        )


def _check_fp8(product, alignment):
    if product.a.transposed or not product.b.transposed:
        raise Unsupported("fp8 operands that do not both run along the summed axis")
    lengths = (product.n, product.k, product.a.ld, product.b.ld, product.ld)
    if any(n % 16 for n in lengths) or alignment < 16:
        raise Unsupported("fp8 lengths that are not multiples of 16")
