"""``rtx info``: versions, devices, what is missing and the command that installs it."""

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import rtxarr
from rtxarr._device import memory_stats

_CORE = (
    "numpy",
    "scipy",
    "numba",
    "array-api-compat",
    "array-api-extra",
    "ml-dtypes",
    "safetensors",
)

# The first driver branch that runs CUDA 13.
_CUDA13_DRIVER = 580


def collect() -> dict[str, Any]:
    """Give everything that ``rtx info`` shows, as JSON's types."""
    gpus = nvidia_gpus()
    extras = _extras(gpus)
    names = [*_CORE, *(name for extra in extras for name in extra["packages"])]
    versions = {name: _version(name) for name in names}
    return {
        "rtxarr": rtxarr.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name, found in versions.items() if found},
        "devices": _devices(gpus),
        "missing": [
            {
                "packages": missing,
                "for": extra["for"],
                "install": f"pip install 'rtxarr[{extra['name']}]'",
            }
            for extra in extras
            if (missing := [name for name in extra["packages"] if versions[name] is None])
        ],
        "problems": problems(gpus, versions.get("numba-cuda")),
    }


def as_json() -> str:
    """Give :func:`collect` as JSON text."""
    return json.dumps(collect(), indent=2)


def as_text() -> str:
    """Give :func:`collect` as a page to read."""
    found = collect()
    lines = [
        f"rtxarr {found['rtxarr']}, Python {found['python']}, {found['platform']}",
        "",
        "devices",
    ]
    for device in found["devices"]:
        lines.append(f"  {device['name']:<8} {device['what']}, {device['memory_mib']:,} MiB")
    lines += ["", "packages"]
    lines += [f"  {name:<24} {number}" for name, number in found["packages"].items()]
    if found["missing"]:
        lines += ["", "missing"]
    for entry in found["missing"]:
        lines.append(f"  {entry['for']}: {', '.join(entry['packages'])}")
        lines.append(f"    {entry['install']}")
    if found["problems"]:
        lines += ["", "problems"]
        lines += [f"  {problem}" for problem in found["problems"]]
    return "\n".join(lines)


def nvidia_gpus() -> list[dict[str, Any]]:
    """Give name, driver, memory and compute capability of each NVIDIA GPU, by ``nvidia-smi``.

    That works without CuPy, so it also finds the GPUs that rtxarr cannot use yet.
    """
    query = "--query-gpu=name,driver_version,memory.total,compute_cap"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in text.splitlines():
        name, driver, memory, capability = (part.strip() for part in line.split(","))
        # A shared GPU may not tell its memory: "[N/A]".
        mib = int(memory) if memory.isdigit() else 0
        gpus.append({"name": name, "driver": driver, "memory_mib": mib, "capability": capability})
    return gpus


def gpu_name(device: rtxarr.Device) -> str:
    """Give what the maker calls a GPU; nothing for the CPU."""
    return repr(device).partition(", ")[2].removesuffix(")")


def cuda_extra(gpus: list[dict[str, Any]]) -> str:
    """Name the extra whose CUDA the driver runs."""
    drivers = [gpu["driver"].partition(".")[0] for gpu in gpus]
    old = any(driver.isdigit() and int(driver) < _CUDA13_DRIVER for driver in drivers)
    return "cuda12" if old else "cuda13"


def problems(gpus: list[dict[str, Any]], numba_cuda: str | None) -> list[str]:
    """Say what is installed but will not work."""
    found = []
    if gpus and len(rtxarr.devices()) == 1 and _version(_cupy(cuda_extra(gpus))):
        found.append(
            f"CuPy is installed but sees no GPU of {len(gpus)}: does it fit driver "
            f"{gpus[0]['driver']}? pip install 'rtxarr[{cuda_extra(gpus)}]'"
        )
    numpy = tuple(map(int, (_version("numpy") or "0.0").split(".")[:2]))
    if numba_cuda and numpy >= (2, 5) and _release(numba_cuda) <= (0, 30, 4):
        found.append(
            f"numba-cuda {numba_cuda} cannot compile kernels with numpy 2.5: "
            "pip install 'numpy<2.5'"
        )
    return found


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def _cupy(extra: str) -> str:
    return f"cupy-{extra}x"


def _extras(gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the extras that suit the machine, what each is for and its packages."""
    cuda = cuda_extra(gpus)
    suffix = cuda.replace("cuda", "cu")
    here = f"{len(gpus)} here" if gpus else "none found here"
    extras = [
        ("cli", "the rtx command", ["typer", "rich", "matplotlib", "threadpoolctl"]),
        (
            cuda,
            f"NVIDIA GPUs ({here})",
            [
                _cupy(cuda),
                "numba-cuda",
                "nvmath-python",
                "nvidia-cudnn-frontend",
                f"nvidia-cudnn-{suffix}",
            ],
        ),
        ("tile", "tensor-core kernels with cuTile", ["cuda-tile"]),
        (
            suffix.replace("cu", "rapids"),
            "cuML and cuGraph",
            [f"cuml-{suffix}", f"cugraph-{suffix}"],
        ),
    ]
    return [{"name": name, "for": what, "packages": names} for name, what, names in extras]


# conda's packages have no CUDA version in their names.
_OTHER_NAMES = ("cupy", "cuml", "cugraph")


def _version(name: str) -> str | None:
    for candidate in (name, *(other for other in _OTHER_NAMES if name.startswith(f"{other}-cu"))):
        try:
            return version(candidate)
        except PackageNotFoundError:
            continue
    return None


def _devices(gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for device in rtxarr.devices():
        mib = memory_stats(device)["total"] // 2**20
        if device.kind == "cpu":
            what = f"{os.cpu_count()} cores"
        else:
            what = gpu_name(device)
            # By name: CUDA_VISIBLE_DEVICES changes the numbers of CuPy's devices alone.
            gpu = next((gpu for gpu in gpus if gpu["name"] == what), None)
            if gpu is not None:
                what += f", compute capability {gpu['capability']}, driver {gpu['driver']}"
        found.append({"name": str(device), "what": what, "memory_mib": mib})
    return found
