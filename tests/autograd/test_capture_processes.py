"""Captured steps in processes of their own: threads at work at once, and what is left behind."""

import gc
import json
import os
import subprocess
import sys
import threading
import traceback
import weakref
from pathlib import Path

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.random import Generator

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def in_a_new_process(function, *args):
    """Give what a function of this file gives, as JSON."""
    module = ".".join(Path(__file__).relative_to(ROOT).with_suffix("").parts)
    command = [sys.executable, "-m", module, function.__name__, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------- threads


def differences_between_threads(place, n_threads, n_rounds):
    """Compare captured steps with eager ones in threads of one stream, while another allocates."""
    found = []

    def allocate(stop):
        with rx.device(place):
            rng = np.random.default_rng(0)
            while not stop.is_set():
                x = rx.full(int(rng.integers(1, 1 << 20)), np.nan, dtype="float32")
                x += 1

    def step(x, rng, in_parts):
        noise = rng.uniform(x.shape, dtype=rx.float32)
        product, noisy = rx.matmul(x, x.T), rx.matmul(noise, x.T)
        parts = {"noise": noise, "x x^T": product, "noise x^T": noisy} if in_parts else {}
        return {**parts, "sum": product + noisy}

    def host(x):
        return x.get() if hasattr(x, "get") else x

    def compare(seed, in_parts):
        rng, same = Generator(seed), Generator(seed)
        for n in (5, 33, 64):
            run = rx.capture(lambda x: step(x, rng, in_parts))
            for i in range(20):
                x = rx.full((n, 8), i, dtype="float32")
                got, want = run(x), step(x, same, in_parts)
                for name in want:
                    a, b = host(got[name]), host(want[name])
                    if a.tobytes() != b.tobytes():
                        at = np.unique(np.nonzero(a != b)[0])[:9].tolist()
                        found.append(
                            f"{name} of {n} rows in thread {seed}, call {i}: {np.sum(a != b)} of "
                            f"{a.size} differ, in rows {at}"
                        )
            if place != "cpu" and run.n_captures != 1:
                found.append(f"{n} rows in thread {seed}: recorded {run.n_captures} times")

    def work(seed, in_parts):
        try:
            with rx.device(place):
                compare(seed, in_parts)
        except BaseException as error:
            found.append("".join(traceback.format_exception(error)))

    for in_parts in range(n_rounds):
        stop = threading.Event()
        allocating = threading.Thread(target=allocate, args=(stop,))
        threads = [threading.Thread(target=work, args=(i, in_parts > 0)) for i in range(n_threads)]
        for thread in (allocating, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        allocating.join()
    return found


@pytest.mark.parametrize(
    ("place", "n_threads", "n_rounds"),
    [("cpu", 2, 2), pytest.param("cuda:0", 6, 2, marks=pytest.mark.gpu)],
)
def test_threads_capture_while_another_allocates(place, n_threads, n_rounds):
    """In a new process, where they are also the first to ask for what they work in."""
    found = in_a_new_process(differences_between_threads, place, n_threads, n_rounds)
    assert not found, "\n".join([f"{len(found)} differences", *found[:9]])


# -------------------------------------------------------------------------------------- memory

N_SIGNATURES = 50
N_ROUNDS = 202  # over all of them; the first is eager


def memory_of_replays():
    """Measure memory before, while and after a step with many graphs is replayed."""
    import cupy

    private = weakref.WeakSet()

    class Pool(cupy.cuda.MemoryPool):
        """One that can be referred to weakly, as CuPy's own cannot."""

        def __init__(self):
            super().__init__()
            private.add(self)

    cupy.cuda.MemoryPool = Pool
    place = rx.device("cuda:0")
    default = cupy.get_default_memory_pool()
    weight = rx.Tensor(cupy.ones((64, 64), "float32"), requires_grad=True)
    rng = Generator(0)

    def step(x):
        weight.grad = None
        loss = rx.sum(rx.dropout(x @ weight, 0.5, generator=rng) ** 2)
        loss.backward()
        return loss

    def held():
        gc.collect()
        cupy.cuda.Device().synchronize()
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "pools": len(private),
            "in private pools": sum(pool.total_bytes() for pool in private),
            "used of the default pool": default.used_bytes(),
            "resident": resident,
            "objects": len(gc.get_objects()),
        }

    def settled():
        default.free_all_blocks()
        found = held()
        found["reserved by the default pool"] = default.total_bytes()
        found["free"] = cupy.cuda.runtime.memGetInfo()[0]
        return found

    def work(n_rounds):
        run = rx.capture(step, max_graphs=N_SIGNATURES)
        inputs = [cupy.ones((n, 64), "float32") for n in range(1, N_SIGNATURES + 1)]
        found = []
        for i in range(n_rounds):
            for x in inputs:
                run(x)
            if i in (9, n_rounds - 1):
                found.append(held() | {"of the graphs": run.pool_bytes(place)})
        weight.grad = None
        return found, run.n_graphs, run.n_captures

    with place:
        for _ in range(2):  # what is made once, and kept
            work(3)
        before = settled()
        (early, late), n_graphs, n_captures = work(N_ROUNDS)
        return {
            "before": before,
            "early": early,
            "late": late,
            "after": settled(),
            "n_graphs": n_graphs,
            "n_captures": n_captures,
        }


@pytest.mark.gpu
def test_gpu_thousands_of_replays_leak_nothing():
    assert N_SIGNATURES * (N_ROUNDS - 1) >= 10_000
    found = in_a_new_process(memory_of_replays)
    assert found["n_graphs"] == found["n_captures"] == N_SIGNATURES
    before, early, late, after = (found[name] for name in ("before", "early", "late", "after"))
    # The graphs' pools are among those that are counted, and go with them.
    assert early["pools"] >= before["pools"] + N_SIGNATURES
    assert 0 < early["of the graphs"] <= early["in private pools"]
    for name in ("pools", "in private pools", "of the graphs", "used of the default pool"):
        assert late[name] == early[name], f"{name}, in replays"
    for name in ("pools", "in private pools", "used of the default pool"):
        assert after[name] == before[name], name
    assert after["reserved by the default pool"] == before["reserved by the default pool"]
    # Of the host's memory, hundreds of bytes a replay, and of objects not one.
    assert late["resident"] - early["resident"] < 8 * MIB
    assert late["objects"] - early["objects"] < 1000
    assert after["resident"] - before["resident"] < 32 * MIB
    assert after["objects"] - before["objects"] < 1000
    if "PYTEST_XDIST_WORKER" not in os.environ:  # others use the GPU, too
        assert before["free"] - after["free"] < 64 * MIB


if __name__ == "__main__":
    name, *args = sys.argv[1:]
    function = {f.__name__: f for f in (differences_between_threads, memory_of_replays)}[name]
    print(json.dumps(function(*(int(x) if x.isdigit() else x for x in args))))
