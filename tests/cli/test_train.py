"""``rtx train`` from end to end, in this process and in processes of its own."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rtxarr as rx
from rtxarr import cli
from rtxarr.autograd import Captured
from rtxarr.cli import _train
from rtxarr.cli._app import app
from rtxarr.data import load_checkpoint, save_checkpoint
from rtxarr.data._atomic import atomic_write
from rtxarr.recipes import _run, gcn_cora

RTX = [sys.executable, str(Path(__file__).parents[2] / "_rtx.py")]
SMALL = ["--set", "epochs=2", "--set", "hidden=4", "--device", "cpu"]
QUICK = ["conv-digits", "--set", "epochs=2", "--set", "channels=4", "--device", "cpu"]
FILES = {
    "checkpoint.safetensors",
    "config.json",
    "curves.png",
    "embedding.png",
    "explanation.png",
    "metrics.jsonl",
    "model.safetensors",
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gcn_cora, "neighbor_layout", lambda x: x[:, :2])  # takes a second


def invoke(*args):
    return CliRunner().invoke(app, ["train", *map(str, args)])


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_time(entries):
    return [{k: v for k, v in entry.items() if k != "epoch_ms"} for entry in entries]


def test_default_recipe_leaves_its_files_in_runs(tmp_path):
    result = invoke(*SMALL, "--seed", 3)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs" / "gcn-cora"
    assert {path.name for path in folder.iterdir()} == FILES
    first, *_, test, last = result.output.splitlines()
    assert first == "gcn-cora on cpu, seed 3, into runs/gcn-cora"
    accuracy = read_metrics(folder)[-1]["test_accuracy"]
    assert test.startswith(f"test accuracy {accuracy:.4f}, parameters of epoch ")
    assert all(name in last for name in FILES)
    assert json.loads((folder / "config.json").read_text())["config"]["hidden"] == 4


def test_taken_default_folder_gets_a_number(tmp_path):
    assert [invoke(*SMALL).exit_code for _ in range(3)] == [0, 0, 0]
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {"gcn-cora", "gcn-cora-2", "gcn-cora-3"}


def test_seeds_decide_the_run(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert invoke(*SMALL, "--out", name, "--seed", seed).exit_code == 0
    a, b, c = (without_time(read_metrics(tmp_path / name)) for name in "abc")
    assert a == b != c


def test_interrupted_run_is_resumed_by_the_command_it_prints(tmp_path):
    settings = [*SMALL[2:], "--set", "epochs=300", "--seed", "7"]
    whole = subprocess.run([*RTX, "train", *settings, "--out", "whole"], capture_output=True)
    assert whole.returncode == 0, whole.stderr.decode()
    process = subprocess.Popen(
        [*RTX, "train", "gcn-cora", *settings, "--out", "my parts"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "my parts" / "metrics.jsonl"
    deadline = time.monotonic() + 30
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 20):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "")
    *_, said, command = output.splitlines()
    n_done = len(read_metrics(tmp_path / "my parts"))
    assert 20 <= n_done < 300
    assert said == f"interrupted: saved after epoch {n_done} of 300. Go on with"
    assert command.strip() == "rtx train --resume --out 'my parts'"
    result = invoke(*shlex.split(command)[2:])
    assert result.exit_code == 0, result.output
    parts = read_metrics(tmp_path / "my parts")
    assert without_time(parts) == without_time(read_metrics(tmp_path / "whole"))


def test_resume_without_a_folder_takes_the_latest_run(tmp_path):
    for seed in (0, 1):
        invoke(*SMALL, "--seed", seed)
    os.utime(tmp_path / "runs" / "gcn-cora" / "checkpoint.safetensors")
    result = invoke("--resume")
    assert result.exit_code == 0
    title, finished, *_ = result.output.splitlines()
    assert title == "gcn-cora on cpu, seed 0, into runs/gcn-cora"
    assert finished == "finished already: 2 of 2 epochs"


@pytest.mark.parametrize(
    "args, message",
    [
        (["gcn-coral"], "got 'gcn-coral'; did you mean 'gcn-cora'"),
        (["--set", "hiden=3"], "explain, got 'hiden'; did you mean 'hidden'"),
        (["--set", "epochs=0"], "epochs must be at least 1, got 0"),
        (["--set", "lr=fast"], "lr must be a number, got 'fast'"),
        (["--set", "lr"], "a setting must be key=value, got 'lr'"),
        (["--device", "gpu"], "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        (["--device", "cuda:77"], "'cuda:77' "),
        (["--seed", "-1"], "--seed"),
        (["--resume"], "there is no run below .*runs to resume; name it with --out"),
        (["--resume", "--out", "nowhere"], "nowhere holds no run to resume: .*config.json"),
        (["--list", "cora"], "got 'cora'; did you mean 'gcn-cora'"),
    ],
)
def test_mistakes_are_named(args, message, tmp_path):
    result = invoke(*args)
    assert result.exit_code == 2
    assert re.search(message, result.output)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [["--weight-decay", "0.1"], ["--weight_decay=0.1"]])
def test_a_setting_taken_for_an_option_is_told_how_to_be_given(option, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = invoke("gcn-cora", *option)
    said = f"{option[0].partition('=')[0]}: settings of a recipe are given as --set weight_decay="
    assert (result.exit_code, said in result.output) == (2, True), result.output
    result = invoke("gcn-cora", "--nope")
    assert (result.exit_code, "--set" in result.output) == (2, False), result.output


def test_the_command_alone_prints_the_help():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert result.output == CliRunner().invoke(app, ["--help"]).output
    assert "Train a recipe" in result.output


def test_a_run_is_neither_overwritten_nor_resumed_as_another(tmp_path):
    assert invoke(*SMALL, "--out", "a").exit_code == 0
    before = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    for args, message in [
        ([], "a is not empty: resume the run in it or choose another folder"),
        (["--resume", "--seed", 1], "seed is 0 there, 1 here"),
        (["--resume", "--set", "lr=0.5"], "lr is 0.01 there, 0.5 here"),
        (["conv-digits", "--resume"], "a has a run of gcn-cora, not of conv-digits"),
    ]:
        result = invoke("--device", "cpu", "--out", "a", *args)
        assert (result.exit_code, message in result.output) == (2, True), result.output
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == before


def test_damaged_checkpoint_and_full_disk_are_reported(tmp_path, monkeypatch):
    invoke(*SMALL, "--out", "a")
    path = tmp_path / "a" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    result = invoke("--resume", "--out", "a")
    assert (result.exit_code, "checkpoint.safetensors: " in result.output) == (1, True)

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_train.recipes, "run", no_space)
    result = invoke(*SMALL, "--out", "b")
    assert (result.exit_code, result.stderr) == (1, "rtx: [Errno 28] No space left on device\n")


def test_full_disk_is_told_with_the_file_and_the_way_on(tmp_path, monkeypatch):
    def no_space(training, folder):
        with atomic_write(folder / "embedding.png"):
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(gcn_cora.Recipe, "finish", no_space)
        result = invoke(*SMALL, "--out", "a")
    assert (result.exit_code, result.stderr) == (
        1,
        f"rtx: [Errno 28] No space left on device; while writing {tmp_path / 'a'}/embedding.png, "
        "which is as it was before\n"
        "go on from the last checkpoint with\n"
        "  rtx train --resume --out a\n",
    )
    assert invoke("--resume", "--out", "a").exit_code == 0


def test_a_checkpoint_of_something_else_is_refused_in_one_line(tmp_path):
    invoke(*SMALL, "--out", "a")
    path = tmp_path / "a" / "checkpoint.safetensors"
    save_checkpoint(path, {**load_checkpoint(path), "history": "abc"})
    result = invoke("--resume", "--out", "a")
    assert (result.exit_code, result.stderr) == (
        1,
        "rtx: a/checkpoint.safetensors: history must list the metrics of each epoch, "
        "of 2 at most\n",
    )


@pytest.mark.parametrize("config", ['{"size": 1}', '{"lr": -1.0}', '{"lr": "fast"}'])
def test_wrong_settings_of_a_resumed_run_are_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(
        f'{{"recipe": "gcn-cora", "seed": 0, "config": {config}, "device": "cpu"}}'
    )
    result = invoke("--resume", "--out", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"rtx: {tmp_path}/config.json: ")


@pytest.mark.parametrize("args", [["--resume", "--out", "runs"], []])
def test_a_file_in_the_place_of_a_folder_is_reported(tmp_path, args):
    (tmp_path / "runs").write_text("")
    result = invoke(*SMALL, *args)
    assert (result.exit_code, "Not a directory: 'runs/" in result.stderr) == (1, True)


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "notes").write_text("")
    result = invoke(*SMALL, "--out", "notes/run")
    assert result.exit_code == 2
    assert result.stderr == "rtx: notes/run must be a folder that can be made: Not a directory\n"


def test_runs_started_at_once_get_folders_of_their_own(tmp_path):
    command = [*RTX, "train", *QUICK]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    lines = [process.communicate(timeout=60)[0].decode().splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    folders = {path.name for path in (tmp_path / "runs").iterdir()}
    assert folders == {"conv-digits", "conv-digits-2"}
    assert {said[0].rpartition("/")[2] for said in lines} == folders


def test_listing_has_no_temporary_files(tmp_path, monkeypatch):
    def leave_one(training, folder):
        (folder / ".model.safetensors.0123456789abcdef.tmp").touch()
        return []

    monkeypatch.setattr(gcn_cora.Recipe, "finish", leave_one)
    assert ".tmp" not in invoke(*SMALL).output


@pytest.mark.parametrize("args", [["train", *QUICK], ["train", "--list"], ["info"], ["--version"]])
def test_closed_output_does_no_harm(args):
    command = shlex.join([*RTX, *args])
    result = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_interrupt_while_the_command_is_loaded_is_no_traceback(monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "find_spec", interrupt)
    assert cli.main() == 130


def test_stopping_at_once_says_how_to_go_on(monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(gcn_cora.Recipe, "finish", stop)
        result = invoke(*SMALL, "--out", "b")
    assert result.exit_code == 143
    assert result.output.endswith(
        "stopped at once; go on from the last checkpoint with\n  rtx train --resume --out b\n"
    )
    with monkeypatch.context() as patched:
        patched.setattr(gcn_cora.Recipe, "finish", stop)
        result = invoke(*SMALL, "--out", "d", "--fuse", "--no-capture")
    assert result.output.endswith("\n  rtx train --resume --out d --no-capture --fuse\n")
    monkeypatch.setattr(gcn_cora.Recipe, "__init__", stop)
    result = invoke(*SMALL, "--out", "c")
    assert result.output.endswith("stopped at once; nothing is saved\n")


class Pretended:
    """A device that says that it is a GPU."""

    kind = "cuda"

    def __init__(self, place):
        self._place = place

    def __enter__(self):
        return self._place.__enter__()

    def __exit__(self, *exc):
        return self._place.__exit__(*exc)


@pytest.mark.parametrize(
    ("on_gpu", "options", "wanted"),
    [
        (True, [], ["jit step", "jit measure"]),
        (True, ["--no-fuse"], ["capture step", "capture measure"]),
        (True, ["--no-capture"], []),
        (False, [], []),
        (False, ["--capture"], ["capture step", "capture measure"]),
    ],
)
def test_steps_are_captured_where_there_is_a_gpu(monkeypatch, on_gpu, options, wanted):
    made = []

    def capture(step):
        made.append(f"capture {step.__name__}")
        return step

    def jit(step, *, capture):
        assert capture
        made.append(f"jit {step.__name__}")
        return step

    monkeypatch.setattr(rx, "capture", capture)
    monkeypatch.setattr(rx, "jit", jit)
    if on_gpu:
        monkeypatch.setattr(_run, "get_device", Pretended)
    result = invoke(*SMALL, *options)
    assert result.exit_code == 0, result.output
    assert made == wanted


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "n_captured"), [([], 2), (["--no-fuse"], 2), (["--no-capture"], 0)]
)
def test_gpu_runs_replay_graphs_unless_told_otherwise(monkeypatch, options, n_captured):
    recorded = []
    record = Captured._record

    def noted(self, *args):
        record(self, *args)
        recorded.append(self)

    monkeypatch.setattr(Captured, "_record", noted)
    settings = ["--set", "epochs=4", "--set", "hidden=4"]
    result = invoke(*settings, *options)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("gcn-cora on cuda:0")
    assert len({*map(id, recorded)}) == n_captured


def test_list_shows_recipes_and_their_settings():
    result = invoke("--list")
    assert result.exit_code == 0
    for text in ("gcn-cora (default)", "conv-digits", "char-transformer", "dropout=0.5"):
        assert text in result.output
    assert "conv-digits" not in invoke("--list", "gcn-cora").output


def test_output_without_a_terminal_is_plain_lines():
    result = subprocess.run([*RTX, "train", *QUICK], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert not re.search(r"[\x1b\r]", result.stdout)
    number = r"\d+\.\d{3}"
    for epoch, line in enumerate(lines[1:3], 1):
        assert re.fullmatch(
            rf"epoch {epoch}/2  loss {number} val {number}  accuracy {number} val {number}  "
            r"\d+ s left  [\d,]+ MiB on cpu",
            line,
        )


def shown_on_a_terminal(*args, **environment):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*RTX, "train", *args],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # what Linux says when the other end is closed
            break
    os.close(ours)
    assert process.wait(timeout=30) == 0
    return shown


def test_terminal_without_unicode_gets_lines():
    shown = shown_on_a_terminal(
        *QUICK, "--out", "läufe", LC_ALL="C", PYTHONIOENCODING="ascii", COLUMNS="40"
    )
    assert b"into l\\xe4ufe" in shown
    assert b"epoch 2/2  loss" in shown
    assert not re.search(rb"[\x1b\x80-\xff]", shown)


def test_terminal_gets_a_progress_bar():
    shown = shown_on_a_terminal(*QUICK, COLUMNS="120", LINES="40")
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.decode())
    assert "epoch 2/2" in text
    assert "━" in text
    assert re.search(r"loss \d\.\d+ val \d\.\d+ +accuracy \d\.\d+ val \d\.\d+", text)
    assert re.search(r"[\d,]+ MiB on cpu", text)


def test_the_progress_bar_fits_into_80_columns():
    shown = shown_on_a_terminal(*QUICK, COLUMNS="80", LINES="24")
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.decode())
    last = next(line for line in reversed(re.split("[\r\n]+", text)) if line.startswith("2/2"))
    assert re.search(r"━ loss.* val 0\.\d+ \d+:\d+ +[\d,]+ MiB$", last.rstrip())
    assert "…" not in last


@pytest.mark.parametrize("columns", ["40", "60"])
def test_the_progress_bar_keeps_the_count_and_the_time_in_few_columns(columns):
    shown = shown_on_a_terminal(*QUICK, COLUMNS=columns, LINES="24")
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.decode())
    last = next(line for line in reversed(re.split("[\r\n]+", text)) if line.startswith("2/2"))
    assert re.search(r"^2/2 [━ ]*loss \d\.\d+ accuracy \d\.\d+ +\d+:\d+$", last.rstrip())
    assert ("━" in last) == (columns == "60")
