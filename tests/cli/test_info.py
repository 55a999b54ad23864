"""``rtx info``, the check for ``rapids doctor``, and starting without the extra."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import rtxarr
from rtxarr import cli
from rtxarr.cli import _doctor, _info
from rtxarr.cli._app import app

ROOT = Path(__file__).parents[2]
GPUS = [{"name": "NVIDIA H200", "driver": "580.65.06", "memory_mib": 143771, "capability": "9.0"}]


def test_json_has_versions_devices_and_what_is_missing():
    result = CliRunner().invoke(app, ["info", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.output)
    keys = ["rtxarr", "python", "platform", "packages", "devices", "missing", "problems"]
    assert list(found) == keys
    assert found["rtxarr"] == rtxarr.__version__
    assert found["packages"]["numpy"] == version("numpy")
    assert [device["name"] for device in found["devices"]] == list(map(str, rtxarr.devices()))
    assert all(device["memory_mib"] >= 0 for device in found["devices"])
    for entry in found["missing"]:
        assert entry["install"].startswith("pip install 'rtxarr[")
        assert not set(entry["packages"]) & set(found["packages"])


def test_text_says_the_same(monkeypatch):
    monkeypatch.setattr(_info, "_version", lambda name: "1.2" if name == "numpy" else None)
    text = CliRunner().invoke(app, ["info"]).output
    assert f"rtxarr {rtxarr.__version__}, Python" in text
    assert "  numpy                    1.2\n" in text
    assert "missing\n  the rtx command: typer, rich, matplotlib, threadpoolctl\n" in text
    assert "    pip install 'rtxarr[cli]'\n" in text


def test_gpus_are_read_from_nvidia_smi(monkeypatch):
    lines = "NVIDIA H200, 580.65.06, 143771, 9.0\nNVIDIA GB10, 580.1, [N/A], 12.1\n"
    answer = SimpleNamespace(stdout=lines)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: answer)
    first, second = _info.nvidia_gpus()
    assert first == GPUS[0]
    assert (second["memory_mib"], second["capability"]) == (0, "12.1")


def test_no_nvidia_smi_means_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _info.nvidia_gpus() == []


@pytest.mark.parametrize(
    "driver, extra, packages",
    [
        ("580.65.06", "cuda13", "cupy-cuda13x"),
        ("570.1", "cuda12", "cupy-cuda12x"),
    ],
)
def test_the_driver_decides_which_cuda_is_suggested(monkeypatch, driver, extra, packages):
    monkeypatch.setattr(_info, "nvidia_gpus", lambda: [{**GPUS[0], "driver": driver}])
    monkeypatch.setattr(_info, "_version", lambda name: None)
    missing = _info.collect()["missing"][1]
    assert packages in missing["packages"]
    assert missing["install"] == f"pip install 'rtxarr[{extra}]'"
    assert missing["for"] == "NVIDIA GPUs (1 here)"


def test_packages_that_do_not_work_together_are_problems(monkeypatch):
    monkeypatch.setattr(_info, "_version", {"numpy": "2.5.0"}.get)
    assert _info.problems([], "0.31.0") == []
    assert "pip install 'numpy<2.5'" in _info.problems([], "0.30.4")[0]
    monkeypatch.setattr(_info, "_version", {"numpy": "2.4.6", "cupy-cuda13x": "14"}.get)
    monkeypatch.setattr(rtxarr, "devices", lambda: [rtxarr.device("cpu")])
    assert "sees no GPU of 1: does it fit driver 580.65.06?" in _info.problems(GPUS, "0.30.4")[0]


def test_doctor_without_a_gpu_names_the_command(monkeypatch):
    monkeypatch.setattr(rtxarr, "devices", lambda: [rtxarr.device("cpu")])
    monkeypatch.setattr(_info, "nvidia_gpus", list)
    with pytest.raises(RuntimeError, match=r"sees no GPU.*pip install 'rtxarr\[cuda13\]'"):
        _doctor.check_gpu(verbose=True)


def test_doctor_runs_a_kernel_and_compares(monkeypatch):
    here = rtxarr.device("cpu")  # stands in for a GPU
    monkeypatch.setattr(rtxarr, "devices", lambda: [here, here])
    monkeypatch.setattr(_info, "problems", lambda *args: ["two things clash"])
    with pytest.warns(UserWarning, match="two things clash"):
        assert "compiles and runs kernels on" in _doctor.check_gpu()
    monkeypatch.setattr(rtxarr, "asarray", lambda x: x * 0)
    monkeypatch.setattr(_info, "problems", lambda *args: [])
    with pytest.raises(RuntimeError, match="a kernel on .* computed"):
        _doctor.check_gpu()


@pytest.mark.gpu
def test_doctor_passes_on_a_gpu():
    assert "cuda:0" in _doctor.check_gpu()


def test_entry_points_lead_to_functions():
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    assert project["scripts"] == {"rtx": "_rtx:main"}
    assert callable(importlib.import_module("_rtx").main)
    checks = project["entry-points"]["rapids_doctor_check"]
    assert checks == {"rtxarr": f"{_doctor.__name__}:{_doctor.check_gpu.__name__}"}


def test_without_the_extra_the_command_says_how_to_install_it(monkeypatch, capsys):
    find = cli.find_spec
    monkeypatch.setattr(cli, "find_spec", lambda n: None if n == "matplotlib" else find(n))
    assert cli.main() == 2
    assert capsys.readouterr().err == (
        "rtx needs matplotlib, not installed here: pip install 'rtxarr[cli]'\n"
    )


@pytest.mark.skipif(os.name == "nt", reason="sends a signal of POSIX")
@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_while_the_command_is_imported_ends_it_quietly(ignored):
    code = (
        "import os, signal, sys\n"
        f"now = signal.SIG_IGN if {ignored} else signal.default_int_handler\n"
        "signal.signal(signal.SIGINT, now)\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *others):\n"
        "        if name == 'rtxarr.autograd': os.kill(os.getpid(), signal.SIGINT)\n"
        "import _rtx\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.exit(_rtx.main())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, cwd=ROOT
    )
    assert (result.returncode, result.stderr) == (0 if ignored else -signal.SIGINT, "")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from _rtx import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True
    )
    assert "train" in result.stdout and "info" in result.stdout
    loaded = set(result.stdout.splitlines()[-1].split())
    assert not loaded & {"matplotlib", "scipy", "numba", "cupy"}
    assert "rtxarr" in loaded


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"rtxarr {rtxarr.__version__}\n")
