"""The check that ``rapids doctor`` runs."""

import warnings
from typing import Any

import numpy as np

import rtxarr
from rtxarr.cli import _info


def check_gpu(verbose: bool = False, **kwargs: Any) -> str:
    """Compile a kernel, run it on each GPU and compare the result.

    Parameters
    ----------
    verbose : bool
        Not needed: the answer is one line.
    **kwargs
        What else ``rapids doctor`` may pass.

    Returns
    -------
    str
        What was found to work; shown when the output is verbose.

    Raises
    ------
    RuntimeError
        When there is no GPU that rtxarr can use, with the command that may help, or when a GPU
        computes something else than the CPU.

    Warns
    -----
    UserWarning
        For packages that do not work together.
    """
    found = _info.collect()
    for problem in found["problems"]:
        warnings.warn(problem, stacklevel=2)
    places = rtxarr.devices()[1:]
    if not places:
        extra = _info.cuda_extra(_info.nvidia_gpus())
        raise RuntimeError(
            f"rtxarr sees no GPU: check `nvidia-smi`, and install pip install 'rtxarr[{extra}]'"
        )
    values = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    indptr = np.array([0, 4, 4, 6])
    want = rtxarr.segment_sum(values, indptr)
    for place in places:
        with place:
            got = rtxarr.segment_sum(rtxarr.asarray(values), rtxarr.asarray(indptr))
            if not np.array_equal(rtxarr.Tensor(got).numpy(), want):
                raise RuntimeError(f"a kernel on {place!r} computed {got}, the CPU {want}")
    return (
        f"rtxarr {rtxarr.__version__} compiles and runs kernels on {', '.join(map(repr, places))}"
    )
