import copy
import gc
import itertools
import json
import math
import pickle
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtxarr.autograd import Tensor
from rtxarr.data import DataLoader


def threads():
    return [t for t in threading.enumerate() if t.name == "rtxarr-prefetch"]


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_left_alone():
    gc.collect()
    gc.freeze()  # those of a session take gc.collect() a tenth of a second


@pytest.fixture(autouse=True)
def no_thread_is_left():
    gc.collect()
    assert threads() == []
    yield
    gc.collect()
    assert threads() == []


def loader_of(n=10, batch_size=3, **options):
    options = {"device": "cpu", "seed": 3, **options}
    return DataLoader(np.arange(n), batch_size, **options)


def as_lists(batches):
    return [batch.tolist() for batch in batches]


class Squares:
    """An indexable object; index ``bad`` fails."""

    def __init__(self, n=10, bad=None):
        self.n, self.bad = n, bad
        self.read = []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert type(i) is int
        self.read.append(i)
        if i == self.bad:
            raise KeyError("broken")
        return {"x": np.full(2, i, np.float32), "y": (i * i, i % 2 == 0), "name": f"n{i}"}


# -------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 9, 10])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_has_every_sample_once(n, drop_last, prefetch):
    if drop_last and n < 3:
        pytest.skip("refused: no batch")
    loader = loader_of(n, drop_last=drop_last, prefetch=prefetch)
    batches = as_lists(loader)
    sizes = [3] * (n // 3) + ([n % 3] if n % 3 and not drop_last else [])
    assert [len(batch) for batch in batches] == sizes
    assert len(loader) == len(sizes)
    seen = sorted(itertools.chain(*batches))
    assert seen == list(range(n)) if not drop_last else len(set(seen)) == 3 * (n // 3)


def test_order_depends_on_seed_and_epoch_alone():
    epochs = [as_lists(loader) for loader in [loader_of()] for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    again = loader_of(prefetch=0)
    again.load_state_dict({"epoch": 2, "position": 0, "seed": 3, "n_samples": 10})
    assert as_lists(again) == epochs[2]
    other_size = loader_of(batch_size=10)
    assert sum(as_lists(other_size), []) == sum(epochs[0], [])
    assert as_lists(loader_of(seed=4)) != epochs[0]


def test_without_shuffling_the_order_is_the_datasets():
    loader = loader_of(7, shuffle=False)
    for epoch in range(2):
        assert loader.epoch == epoch
        assert as_lists(loader) == [[0, 1, 2], [3, 4, 5], [6]]


def test_shuffling_is_uniform():
    loader = loader_of(4, 4)
    first = np.bincount([next(iter(loader))[0] for _ in range(2000)], minlength=4)
    assert first.sum() == 2000
    assert np.all(abs(first - 500) < 5 * math.sqrt(2000 * 3 / 16))


# ---------------------------------------------------------------------------------- batches


def test_arrays_of_any_library(xp):
    x = xp.reshape(xp.arange(12, dtype=xp.float32), (6, 2))
    device = "cuda:0" if xp.__name__.endswith("cupy") else "cpu"
    loader = DataLoader({"x": x, "pair": x[:, 0]}, 4, shuffle=False, device=device)
    batches = list(loader)
    assert [tuple(batch["x"].shape) for batch in batches] == [(4, 2), (2, 2)]
    assert type(batches[0]["x"]) is type(x)
    assert batches[0]["pair"].dtype == x.dtype
    if not type(x).__module__.startswith("dask"):
        assert [float(v) for v in batches[1]["pair"]] == [8.0, 10.0]


def test_structure_is_kept():
    x, y = np.arange(10.0), np.arange(10)
    batch = next(iter(DataLoader((x, y), 4, device="cpu")))
    assert isinstance(batch, tuple)
    np.testing.assert_array_equal(batch[0], batch[1])
    batch = next(iter(DataLoader({"x": x, "y": y}, 4, device="cpu")))
    assert list(batch) == ["x", "y"]
    np.testing.assert_array_equal(batch["x"], batch["y"])


def test_tensors_give_raw_arrays():
    t = Tensor(np.arange(3.0))
    for dataset in (t, [Tensor(np.asarray(v)) for v in t.data]):
        (batch,) = DataLoader(dataset, 3, shuffle=False, device="cpu")
        assert type(batch) is np.ndarray
        assert batch.tolist() == [0, 1, 2]
    assert type(next(iter(DataLoader((t, t), 2, device="cpu")))[1]) is np.ndarray


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_do_not_share_memory_with_the_dataset(shuffle):
    x = np.arange(10)
    for batch in DataLoader(x, 5, shuffle=shuffle, device="cpu"):
        batch[...] = -1
    assert x.tolist() == list(range(10))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_objects_are_stacked_field_by_field(prefetch):
    loader = DataLoader(Squares(), 4, shuffle=False, device="cpu", prefetch=prefetch)
    first = next(iter(loader))
    assert first["x"].dtype == np.float32
    assert first["x"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert first["y"][0].tolist() == [0, 1, 4, 9]
    assert first["y"][1].tolist() == [True, False, True, False]
    assert first["name"] == ["n0", "n1", "n2", "n3"]
    loader.close()


def test_half_types_are_kept():
    x = np.arange(6).astype(ml_dtypes.bfloat16)
    (batch,) = DataLoader([v.reshape(1) for v in x], 6, shuffle=False, device="cpu")
    assert batch.dtype == x.dtype
    assert batch.shape == (6, 1)


def test_transform_sees_samples_and_collate_a_list():
    loader = DataLoader(
        (np.arange(5), np.arange(5.0)),
        2,
        shuffle=False,
        device="cpu",
        transform=lambda sample: int(sample[0]) * 10 + sample[1],
        collate=lambda samples: ("made", [float(v) for v in samples]),
    )
    assert list(loader) == [("made", [0, 11]), ("made", [22, 33]), ("made", [44])]


def test_a_transform_can_be_a_builtin_or_have_defaults():
    assert as_lists(loader_of(3, transform=float, shuffle=False)) == [[0, 1, 2]]
    assert as_lists(loader_of(3, transform=lambda x, k=2: x * k, shuffle=False)) == [[0, 2, 4]]


def test_random_transforms_depend_on_epoch_and_sample_alone():
    def noisy(x, rng):
        return float(x) + float(rng.uniform(()))

    options = {"transform": noisy, "shuffle": False}
    epochs = [sum(as_lists(loader), []) for loader in [loader_of(**options)] for _ in range(2)]
    assert len(set(epochs[0] + epochs[1])) == 20
    assert [math.floor(v) for v in epochs[1]] == list(range(10))
    resumed = loader_of(batch_size=2, prefetch=0, **options)
    resumed.load_state_dict({"epoch": 1, "position": 4, "seed": 3, "n_samples": 10})
    assert sum(as_lists(resumed), []) == epochs[1][4:]


# ------------------------------------------------------------------------------- resumption


@given(
    n=st.integers(1, 17),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    prefetch=st.sampled_from([0, 1, 3]),
    n_before=st.integers(0, 20),
)
def test_resumes_to_the_sample(n, batch_size, drop_last, prefetch, n_before):
    drop_last = drop_last and batch_size <= n
    options = {"batch_size": batch_size, "drop_last": drop_last, "prefetch": prefetch}

    def stream(loader, first=None):
        while True:
            for batch in loader:
                yield loader.epoch, batch.tolist()

    whole = loader_of(n, **options)
    batches = stream(whole)
    for _ in range(n_before):
        next(batches)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = loader_of(n, **options)
    resumed.load_state_dict(state)
    rest = stream(resumed)
    for _ in range(8):
        assert next(rest) == next(batches)
    batches.close()
    rest.close()


def test_state_counts_what_was_handed_out_not_what_was_read_ahead():
    dataset = Squares(12)
    loader = DataLoader(dataset, 2, device="cpu", prefetch=3)
    for i, _ in enumerate(loader, start=1):
        assert loader.state_dict()["position"] == 2 * i
        if i == 2:
            break
    assert len(dataset.read) > 4
    assert loader.state_dict()["position"] == 4


def test_a_loop_left_early_is_continued():
    whole = as_lists(loader_of())
    loader = loader_of()
    parts = []
    for batch in loader:
        parts.append(batch.tolist())
        break
    parts += as_lists(loader)
    assert parts == whole
    assert loader.state_dict() == {"epoch": 1, "position": 0, "seed": 3, "n_samples": 10}


def test_a_loop_left_in_its_last_round_is_over():
    loader = loader_of(4, 4)
    epochs = [next(iter(loader)).tolist() for _ in range(5)]
    assert loader.state_dict() == {"epoch": 5, "position": 0, "seed": 3, "n_samples": 4}
    whole = loader_of(4, 4)
    assert epochs == [batch.tolist() for _ in range(5) for batch in whole]


def test_a_state_from_the_last_round_leaves_an_empty_rest():
    loader = loader_of()
    states = [loader.state_dict() for _ in loader]
    again = loader_of()
    again.load_state_dict(states[-1])
    assert as_lists(again) == []
    assert again.epoch == 1
    assert as_lists(again) == as_lists(loader)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_where_the_loop_stands(duplicate):
    loader = loader_of(10, 2)
    for _ in loader:
        break
    batches = iter(loader)
    next(batches)
    other = duplicate(loader)
    assert other.state_dict() == loader.state_dict()
    assert [x.tolist() for x in other] == [x.tolist() for x in batches]


def test_batch_size_may_change_on_resumption():
    order = sum(as_lists(loader_of()), [])
    loader = loader_of(batch_size=4)
    loader.load_state_dict({"epoch": 0, "position": 3, "seed": 3, "n_samples": 10})
    assert as_lists(loader) == [order[3:7], order[7:]]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 4}, "seed in state must be this loader's 3, got 4"),
        ({"n_samples": 9}, "n_samples in state must be this loader's 10, got 9"),
        ({"position": 11}, "position must be at most 10, got 11"),
        ({"position": -1}, "position must be at least 0, got -1"),
        ({"epoch": -1}, "epoch must be at least 0"),
        ({"more": 1}, "state must have the keys"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, match):
    loader = loader_of()
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(ValueError, match=match):
        loader.load_state_dict({**before, "epoch": 5, **change})
    assert loader.state_dict() == before


def test_epoch_must_be_an_int():
    with pytest.raises(TypeError, match="epoch must be an int, got 1.0"):
        loader_of().load_state_dict({**loader_of().state_dict(), "epoch": 1.0})


# --------------------------------------------------------------------- errors and threads


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_names_the_sample_and_comes_in_its_place(prefetch):
    loader = DataLoader(Squares(bad=5), 2, shuffle=False, device="cpu", prefetch=prefetch)
    names = []
    with pytest.raises(KeyError, match="broken") as caught:
        for batch in loader:
            names += batch["name"]
    assert names == ["n0", "n1", "n2", "n3"]
    assert caught.value.__notes__ == ["while loading sample 5 in epoch 0"]
    assert any("__getitem__" in str(entry) for entry in caught.traceback)
    assert loader.state_dict()["position"] == 4


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [StopIteration, GeneratorExit, KeyboardInterrupt, SystemExit])
def test_no_error_passes_for_the_end(prefetch, error):
    def fail(sample):
        raise error

    # A generator turns StopIteration into RuntimeError; the loop must not just end.
    expected = RuntimeError if error is StopIteration else error
    with pytest.raises(expected):
        list(loader_of(transform=fail, prefetch=prefetch))


def test_ragged_samples_name_the_batch():
    loader = DataLoader([np.zeros(1), np.zeros(2)], 2, shuffle=False, device="cpu")
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the words are NumPy's)
        list(loader)
    assert caught.value.__notes__ == ["while making a batch of the samples [0, 1]"]


def test_leaving_a_loop_ends_the_thread():
    for _ in loader_of(100, 1):
        assert len(threads()) == 1
        break
    assert threads() == []
    with pytest.raises(ZeroDivisionError):
        for _ in loader_of(100, 1):
            raise ZeroDivisionError
    gc.collect()
    assert threads() == []


def test_an_iterator_that_is_never_used_starts_no_thread():
    iterator = iter(loader_of())
    assert threads() == []
    del iterator


def test_close_ends_the_thread_and_the_loop():
    loader = loader_of()
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert threads() == []
    with pytest.raises(RuntimeError, match="this loop has ended"):
        next(iterator)
    assert loader.state_dict()["position"] == 3


def test_a_second_loop_ends_the_first():
    loader = loader_of()
    first = iter(loader)
    head = next(first).tolist()
    rest = as_lists(loader)
    assert [head, *rest] == as_lists(loader_of())
    with pytest.raises(RuntimeError, match="this loop has ended"):
        next(first)


def test_loading_a_state_in_a_loop_ends_it():
    loader = loader_of()
    state = loader.state_dict()
    with pytest.raises(RuntimeError, match="this loop has ended"):
        for _ in loader:
            loader.load_state_dict(state)
    assert loader.state_dict() == state


@pytest.mark.parametrize("where", ["held", "dropped"])
def test_the_interpreter_exits_with_a_loop_in_progress(where):
    code = (
        "import numpy as np\n"
        "from rtxarr.data import DataLoader\n"
        "loader = DataLoader(np.arange(1000), 1, device='cpu')\n"
        "iterator = iter(loader); next(iterator)\n"
    ) + ("" if where == "held" else "del loader, iterator\n")
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_reads_ahead_no_further_than_told():
    dataset = Squares(100)
    iterator = iter(DataLoader(dataset, 1, device="cpu", prefetch=3))
    next(iterator)
    for _ in range(100):
        if len(dataset.read) >= 5:
            break
        threading.Event().wait(0.01)
    threading.Event().wait(0.05)
    assert len(dataset.read) == 5  # one handed out, three in the queue, one in the thread's hand
    iterator.close()


# --------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((3, 1), {}, TypeError, "dataset must be an array, .* got int"),
        (({"x": [1]}, 1), {}, TypeError, "a dict as dataset must hold arrays, got list"),
        (({}, 1), {}, TypeError, "a dict as dataset must hold arrays, got nothing"),
        (((np.zeros(2), np.zeros(3)), 1), {}, ValueError, r"one length, got \[2, 3\]"),
        ((np.zeros(()), 1), {}, ValueError, r"got one of shape \(\)"),
        ((np.zeros(3), 0), {}, ValueError, "batch_size must be at least 1, got 0"),
        ((np.zeros(3), 1.5), {}, TypeError, "batch_size must be an int, got 1.5"),
        ((np.zeros(3), True), {}, TypeError, "batch_size must be an int, got True"),
        ((np.zeros(3), 4), {"drop_last": True}, ValueError, "at most 3, the number of samples"),
        ((np.zeros(3), 1), {"prefetch": -1}, ValueError, "prefetch must be at least 0, got -1"),
        ((np.zeros(3), 1), {"seed": 0.5}, TypeError, "seed must be an int, got 0.5"),
        ((np.zeros(3), 1), {"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        (
            (np.zeros(3), 1),
            {"seed": 2**64},
            ValueError,
            "seed must be less than 18446744073709551616",
        ),
        ((np.zeros(3), 1), {"device": "tpu"}, ValueError, "device must be"),
    ],
)
def test_bad_arguments(arguments, options, error, match):
    with pytest.raises(error, match=match):
        DataLoader(*arguments, **options)


@pytest.mark.parametrize("y", [np.arange(5), np.zeros((5, 1)), np.zeros((5, 3), np.float32)])
def test_a_list_of_fields_is_no_dataset_of_samples(y):
    x = np.zeros((5, 3))
    with pytest.raises(TypeError, match=r"got a list of them, which means 2 samples: write \(x, y"):
        DataLoader([x, y], 4)
    assert len(DataLoader([x, y], 4, collate=list)) == 1
    assert len(DataLoader([x, y], 4, transform=np.sum)) == 1
    assert len(DataLoader([x, y], 1)) == 2
    assert len(DataLoader([x, x], 2)) == 1


def test_repr():
    assert repr(loader_of()) == (
        "DataLoader(10 samples, batch_size=3, device='cpu', epoch=0, position=0)"
    )


# -------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_batches_arrive_whole_on_the_gpu(prefetch):
    import cupy

    x = np.random.default_rng(0).normal(size=(400, 1000)).astype(np.float32)
    half = x.astype(ml_dtypes.bfloat16)
    loader = DataLoader((x, half, np.arange(400)), 16, device="cuda:0", prefetch=prefetch)
    work = cupy.ones((2000, 2000), cupy.float32)
    seen = []
    for batch, narrow, index in loader:
        work = work @ work * 1e-4  # keeps the consumer's stream busy, so that copies overlap
        seen.append((batch.sum(axis=1), batch * 1, narrow, index))
        del batch  # its memory goes back to the pool while copies are under way
    for _, kept, narrow, index in seen:
        np.testing.assert_array_equal(kept.get(), x[index.get()])
        assert narrow.get().tobytes() == half[index.get()].tobytes()
    assert sorted(np.concatenate([index.get() for *_, index in seen])) == list(range(400))


@pytest.mark.gpu
def test_leaving_early_on_the_gpu_keeps_later_work_right():
    import cupy

    x = np.arange(200 * 4096, dtype=np.float32).reshape(200, 4096)
    for _ in range(20):
        batch = next(iter(DataLoader(x, 10, device="cuda:0", prefetch=4)))
        fresh = [cupy.full((10, 4096), 7, cupy.float32) for _ in range(8)]
        assert all(bool((f == 7).all()) for f in fresh)
        assert bool(cupy.isin(batch[:, 0], cupy.asarray(x[:, 0])).all())


@pytest.mark.gpu
def test_device_arrays_are_indexed_where_they_are():
    import cupy

    x = cupy.arange(10)
    loader = DataLoader(x, 3, seed=3)
    assert loader.device == "cuda:0"
    iterator = iter(loader)
    first = next(iterator)
    assert isinstance(first, cupy.ndarray)
    assert threads() == []
    assert [first.tolist(), *as_lists(iterator)] == as_lists(loader_of())
    assert isinstance(next(iter(loader_of(3, device="cuda:0"))), cupy.ndarray)
    on_host = DataLoader(x, 3, seed=3, device="cpu")
    assert isinstance(next(iter(on_host)), np.ndarray)


@pytest.mark.gpu
def test_text_stays_on_the_host():
    loader = DataLoader(Squares(), 4, shuffle=False, device="cuda:0")
    batch = next(iter(loader))
    assert batch["name"] == ["n0", "n1", "n2", "n3"]
    assert batch["y"][0].tolist() == [0, 1, 4, 9]
    assert batch["x"].device.id == 0
    loader.close()


@pytest.mark.gpu
def test_a_stream_of_the_consumers_own():
    import cupy

    x = np.random.default_rng(1).normal(size=(300, 2000)).astype(np.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        got = [
            (batch * 2, index) for batch, index in DataLoader((x, np.arange(300)), 20, prefetch=3)
        ]
        stream.synchronize()
    for doubled, index in got:
        np.testing.assert_array_equal(doubled.get(), 2 * x[index.get()])


@pytest.mark.gpu
def test_samples_on_the_gpu():
    import cupy

    samples = [cupy.full((500, 500), i, cupy.float32) for i in range(40)]
    with cupy.cuda.Stream(non_blocking=True):
        got = [batch * 1 for batch in DataLoader(samples, 8, shuffle=False, device="cuda:0")]
        got = cupy.concatenate(got)[:, 0, 0].tolist()
    assert got == list(range(40))
    assert isinstance(next(iter(DataLoader(samples, 8, device="cpu"))), np.ndarray)
