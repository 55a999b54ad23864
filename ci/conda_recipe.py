"""Lint, render, solve, build and test conda-recipe/ with wheels from PyPI alone.

No conda server is needed: the packages that the recipe names are stubs in a channel on
disk. The stub of Python runs this interpreter, so the recipe's own tests run for real
against what is installed here. The pins are checked against the metadata of RAPIDS 26.10.
"""

import asyncio
import os
import shutil
import sys
import tempfile
import tomllib
import traceback
from pathlib import Path

import rattler
from rattler.exceptions import SolverError
from rattler.index import index_fs
from rattler_build import (
    Package,
    PlatformConfig,
    RenderConfig,
    Stage0Recipe,
    ToolConfiguration,
    VariantConfig,
    assemble_package,
)
from rattler_build.progress import ProgressCallback

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "conda-recipe" / "recipe.yaml"
PLATFORM = "linux-64"

PLANTED_ERRORS = {
    "noarch value": ("noarch: python", "noarch: pyton"),
    "unknown field": ("requirements:", "requirments:"),
    "version spec": ("numpy >=2.0,<2.5", "numpy >>=2.0"),
    "undefined variable": ("${{ python_min }}", "${{ python_mni }}"),
    "licence that is not SPDX": ("Apache-2.0", "Apache 2"),
}

CONDA_NAMES = {"matplotlib": "matplotlib-base", "ml-dtypes": "ml_dtypes"}

STUBS = {
    "array-api-compat": ["1.16.0"],
    "array-api-extra": ["0.11.5"],
    "cuda-version": ["12.9", "13.3"],
    "cupy": ["13.6.0", "14.1.0", "14.2.0"],
    "hatchling": ["1.33.0"],
    "matplotlib-base": ["3.11.2"],
    "ml_dtypes": ["0.6.0"],
    "numba": ["0.59.0", "0.64.0", "0.68.1"],
    "numba-cuda": ["0.22.2", "0.30.4", "0.31.0"],
    "numpy": ["1.26.4", "2.4.6", "2.5.5"],
    "pip": ["26.3"],
    "rich": ["15.0.0"],
    "safetensors": ["0.8.0"],
    "scipy": ["1.17.1"],
    "threadpoolctl": ["3.8.0"],
    "typer": ["0.29.2"],
}
RAPIDS = [
    "python >=3.11",
    "cuda-version >=13,<14",
    "cupy >=14.0.1,!=14.1.0",
    "numba >=0.60.0,<0.65.0",
    "numba-cuda >=0.22.2,<0.31.0",
    "numpy >=2.0,<3.0",
]
RAPIDS_STUBS = {
    "cudf": ("26.10.02", RAPIDS),
    "cuml": ("26.10.00", [*RAPIDS, "cudf =26.10"]),
    "cugraph": ("26.10.00", [*RAPIDS, "cudf =26.10"]),
}

# What to install, the CUDA version of the machine, and what must come (None: no solution).
SOLVES = [
    (["rtxarr"], "13.0", {"numba": "0.68.1", "numba-cuda": "0.31.0", "numpy": "2.4.6"}),
    (["rtxarr"], "12.2", {"cupy": "14.2.0"}),
    (["rtxarr"], None, {"cupy": "14.2.0"}),
    (
        ["rtxarr", "cuml", "cugraph"],
        "13.0",
        {"numba": "0.64.0", "numba-cuda": "0.30.4", "cupy": "14.2.0", "numpy": "2.4.6"},
    ),
    (["rtxarr"], "11.8", None),
    (["rtxarr", "cuml", "numba >=0.65"], "13.0", None),
    (["rtxarr", "cupy 13.*"], "13.0", None),
    (["rtxarr", "cupy ==14.1.0"], "13.0", None),
    (["rtxarr", "numpy >=2.5"], "13.0", None),
    (["rtxarr", "numpy <2"], "13.0", None),
]


def render(text=None):
    """Render the recipe file, or ``text`` in its place."""
    recipe = Stage0Recipe.from_file(str(RECIPE)) if text is None else Stage0Recipe.from_yaml(text)
    config = RenderConfig(
        platform=PlatformConfig(target_platform=PLATFORM, experimental=True),
    )
    return recipe.render(VariantConfig.from_file(str(RECIPE.with_name("variants.yaml"))), config)


def lint():
    """Check that the recipe renders and that each planted error is refused."""
    (variant,) = render()
    print("lint: the recipe renders:", variant.variant)
    # from_yaml knows no folder to load ../pyproject.toml from.
    text = RECIPE.read_text()
    version_line = next(line for line in text.splitlines() if "load_from_file" in line)
    text = text.replace(version_line, '  version: "0.0.0"')
    render(text)
    for name, (right, wrong) in PLANTED_ERRORS.items():
        assert right in text, f"the recipe no longer has {right!r}"
        try:
            render(text.replace(right, wrong))
        except Exception as error:
            print(f"lint: refused, {name}: {str(error).splitlines()[0][:100]}")
        else:
            raise AssertionError(f"the linter let a wrong {name} through")


def check_requirements():
    """Check that the recipe asks for what pyproject.toml does, with the extra `cli`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cli"]]
    run = [line.strip(" -").replace(" ", "") for line in RECIPE.read_text().splitlines()]
    for requirement in wanted:
        for name, conda_name in CONDA_NAMES.items():
            requirement = requirement.replace(name, conda_name)
        # The recipe may add an upper bound.
        assert any(line.startswith(requirement) for line in run), f"no {requirement} in the recipe"
    print(f"requirements: {len(wanted)}, the same as in pyproject.toml")


def add_package(channel, name, version, *, depends=(), files=None, noarch=True):
    """Put a package into the channel; without files it holds one line."""
    if files is None:
        files = channel.parent / "stage" / f"{name}-{version}"
        (files / "share").mkdir(parents=True)
        (files / "share" / f"{name}.stub").write_text(version)
    subdir = "noarch" if noarch else PLATFORM
    assemble_package(
        name,
        version,
        subdir,
        "stub_0",
        channel / subdir,
        files_dir=files,
        depends=list(depends),
        noarch="generic" if noarch else None,
        detect_prefix=False,
    )


def add_python(channel):
    """Put a package into the channel whose `python` starts this interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    short = ".".join(map(str, sys.version_info[:2]))
    files = channel.parent / "stage" / "python"
    site_packages = files / "lib" / f"python{short}" / "site-packages"
    site_packages.mkdir(parents=True)
    (site_packages / "README.txt").write_text("stub")
    (files / "bin").mkdir()
    for name in ("python", "python3", f"python{short}"):
        script = files / "bin" / name
        script.write_text(
            "#!/bin/sh\n"
            'here=$(cd "$(dirname "$0")/.." && pwd)\n'
            f'export PYTHONPATH="$here/lib/python{short}/site-packages"\n'
            f'exec {sys.executable} "$@"\n'
        )
        script.chmod(0o755)
    add_package(channel, "python", version, files=files, noarch=False)


def make_channel(folder):
    """Build the channel of stubs and return its path."""
    channel = folder / "channel"
    for subdir in ("noarch", PLATFORM):
        (channel / subdir).mkdir(parents=True)
    add_python(channel)
    for name, versions in STUBS.items():
        for version in versions:
            add_package(channel, name, version)
    for name, (version, depends) in RAPIDS_STUBS.items():
        add_package(channel, name, version, depends=depends)
    asyncio.run(index_fs(channel))
    return channel


class BuildLog(ProgressCallback):
    """Keeps what the builder and the recipe's tests print."""

    def __init__(self):
        self.lines = []

    def on_log(self, event):
        self.lines += event.message.splitlines()


def build_and_test(channel, folder):
    """Build the package, run the recipe's tests and return the built file."""
    (variant,) = render()
    log = BuildLog()
    try:
        result = variant.run_build(
            tool_config=ToolConfiguration(test_strategy="native"),
            output_dir=str(folder / "output"),
            channels=[channel.as_uri()],
            progress_callback=log,
        )
    except Exception:
        print(*log.lines[-60:], sep="\n")
        raise
    (path,) = result.packages
    package = Package.from_file(path)
    assert package.noarch == "python", package.noarch
    assert any(spec.startswith("__cuda") for spec in package.constrains), package.constrains
    assert not any(spec.startswith("__cuda") for spec in package.depends), package.depends
    print(f"build: {package.filename}, {Path(path).stat().st_size} bytes, its tests passed")
    return Path(path)


async def solve(channel, specs, cuda):
    """Return the solved versions by name on a machine with this CUDA driver (None: no GPU)."""
    virtual = []
    if cuda is not None:
        name, build = rattler.PackageName("__cuda"), rattler.BuildString("0")
        virtual.append(rattler.GenericVirtualPackage(name, rattler.Version(cuda), build))
    records = await rattler.solve(
        sources=[channel.as_uri()],
        specs=specs,
        platforms=[PLATFORM, "noarch"],
        virtual_packages=virtual,
    )
    return {record.name.normalized: str(record.version) for record in records}


async def check_solves(channel):
    """Compare every case of SOLVES with what the solver says."""
    for specs, cuda, wanted in SOLVES:
        case = f"{', '.join(specs)} on CUDA {cuda}"
        try:
            found = await solve(channel, specs, cuda)
        except SolverError as error:
            assert wanted is None, f"{case}: {error}"
            print(f"solve: {case}: none, as it must be")
            continue
        assert wanted is not None, f"{case}: solved, and must not: {found}"
        picked = {name: found[name] for name in wanted}
        assert picked == wanted, f"{case}: got {picked}, not {wanted}"
        print(f"solve: {case}: {picked}")


def main():
    lint()
    check_requirements()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        channel = make_channel(folder)
        package = build_and_test(channel, folder)
        shutil.copy(package, channel / "noarch")
        asyncio.run(index_fs(channel))
        asyncio.run(check_solves(channel))


if __name__ == "__main__":
    status = 0
    try:
        main()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # py-rattler's threads abort an ordinary interpreter shutdown
