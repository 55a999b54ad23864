"""Whole steps as programs: the results, and the state after them, are those of the step itself."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom, nn, optim
from rtxarr.autograd._capture_errors import Unsettled
from rtxarr.testing import assert_close

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 8)).astype(np.float32)
LABELS = RNG.integers(0, 3, 16)
TARGET = RNG.standard_normal((16, 3)).astype(np.float32)
GRAPH = geom.Graph.from_edges(*RNG.integers(0, 16, (2, 60)), n_nodes=16)


def perceptron(**options):
    return nn.Sequential(nn.Linear(8, 16, **options), rx.gelu, nn.Linear(16, 3, **options))


class Training:
    """A model, an optimizer and a step; subclasses say what is special."""

    jitted = 1  # kinds of programs that it takes

    def __init__(self):
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()

    def make_model(self):
        return perceptron()

    def make_optimizer(self):
        return optim.Adam(self.model.parameters(), 1e-2)

    def loss(self, x, labels):
        return rx.cross_entropy(self.model(x), labels)

    def step(self, x, labels):
        self.optimizer.zero_grad()
        loss = self.loss(x, labels)
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self):
        arrays = {name: p.data for name, p in self.model.named_parameters()}
        arrays |= {f"{n}.grad": p.grad for n, p in self.model.named_parameters()}
        arrays |= dict(self.model.named_buffers())
        for i, held in enumerate(self.optimizer.state.values()):
            arrays |= {f"{i}.{name}": value for name, value in held.items()}
        return arrays


class Momentum(Training):
    def make_optimizer(self):
        return optim.SGD(self.model.parameters(), 0.1, momentum=0.9)


class Transformer(Training):
    def make_model(self):
        return nn.TransformerBlock(8, 2, dropout=0.1)

    def loss(self, x, labels):
        return rx.mean(self.model(rx.reshape(x, (2, 8, 8))) ** 2)


def flat(x):
    return rx.reshape(x, (x.shape[0], -1))


class Convolution(Training):
    def make_model(self):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm(4),
            rx.relu,
            flat,
            nn.Linear(32, 3),
        )

    def loss(self, x, labels):
        return rx.cross_entropy(self.model(rx.reshape(x, (16, 1, 2, 4))), labels)


class GraphNetwork(Training):
    def make_model(self):
        return geom.GCNConv(8, 3)

    def loss(self, x, labels):
        return rx.cross_entropy(self.model(GRAPH, x), labels)


class Attention(Training):
    def make_model(self):
        return geom.GATConv(8, 3, heads=2, concat=False, dropout=0.3)

    def loss(self, x, labels):
        return rx.cross_entropy(self.model(GRAPH, x), labels)


class Dropout(Training):
    def make_model(self):
        return nn.Sequential(nn.Linear(8, 16), rx.relu, nn.Dropout(0.5), nn.Linear(16, 3))


class Scheduled(Training):
    def make_optimizer(self):
        return optim.AdamW(self.model.parameters(), lambda n: 1e-2 / (1 + n))


class Clipped(Training):
    def step(self, x, labels):
        self.optimizer.zero_grad()
        loss = self.loss(x, labels)
        loss.backward()
        norm = optim.clip_grad_norm(self.model.parameters(), 0.1)
        self.optimizer.step()
        return {"loss": loss, "norm": norm}


class Accumulated(Training):
    jitted = 2  # with gradients to add to, and without

    def step(self, x, labels):
        loss = self.loss(x, labels)
        loss.backward()
        return loss


class ZeroedAfter(Training):
    def step(self, x, labels):
        loss = self.loss(x, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Twice(Training):
    def step(self, x, labels):
        self.optimizer.zero_grad()
        for part in (slice(0, 8), slice(8, 16)):
            loss = self.loss(x[part], labels[part])
            loss.backward()
        self.optimizer.step()
        return loss


class ByHand(Training):
    def step(self, x, labels):
        self.optimizer.zero_grad()
        loss = self.loss(x, labels)
        loss.backward()
        for p in self.model.parameters():
            p.assign(p.data - 0.1 * p.grad)
        return loss


class Averaged(Training):
    def __init__(self):
        super().__init__()
        self.average = optim.ExponentialMovingAverage(self.model.parameters(), 0.9)

    def step(self, x, labels):
        loss = super().step(x, labels)
        self.average.update()
        return loss

    def state(self):
        return super().state() | {f"average {i}": a for i, a in enumerate(self.average.averages)}


class Mixed(Training):
    jitted = 1

    def step(self, x, labels):
        self.optimizer.zero_grad()
        with rx.autocast("bfloat16"):
            loss = self.loss(x, labels)
        loss.backward()
        self.optimizer.step()
        return loss


class Checkpointed(Training):
    def loss(self, x, labels):
        return rx.cross_entropy(rx.checkpoint(self.model, x), labels)


CASES = {kind.__name__: kind for kind in (Training, *Training.__subclasses__())}


def trained(kind, wrap, n_steps=4):
    rx.random.seed(0)
    run = kind()
    step = wrap(run.step)
    results = [step(X, LABELS) for _ in range(n_steps)]
    return run, step, results


def values(result):
    return [r.data if isinstance(r, rx.Tensor) else r for r in rx.autograd._tree.flatten(result)[0]]


@pytest.mark.parametrize("kind", CASES.values(), ids=CASES)
def test_a_step_is_that_of_the_function(kind):
    plain, _, want = trained(kind, lambda step: step)
    place = rx.random.default_generator().state_dict()
    run, step, got = trained(kind, rx.jit)
    assert not step.reasons
    assert step.n_traces == kind.jitted
    close = {} if kind in (Convolution, GraphNetwork, Attention) else {"exact": True}
    for a, b in zip(values(got), values(want), strict=True):
        assert_close(a, b, **close)
    ours, theirs = run.state(), plain.state()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if value is None or isinstance(value, int):
            assert ours[name] is value or ours[name] == value
        else:
            assert_close(ours[name], value, **close)
    assert rx.random.default_generator().state_dict() == place


def test_arguments_with_gradients():
    w = rx.Tensor(np.array([1.0, 2.0]), requires_grad=True)

    @rx.jit
    def step(x):
        loss = rx.sum(x * x * w)
        loss.backward()
        return loss

    x = rx.Tensor(np.array([3.0, 4.0]), requires_grad=True)
    assert step(x).item() == 41
    assert_close(x.grad, np.array([6.0, 16.0]))
    step(x)
    assert_close(x.grad, np.array([12.0, 32.0]))
    assert_close(w.grad, np.array([18.0, 32.0]))


def test_arguments_whose_gradients_are_set_anew():
    def clears(x, y):
        x.grad = None
        rx.sum(x * x * y).backward()

    def forgets(x, y):
        rx.sum(x * y).backward()
        x.grad = None

    def halves(x, y):
        y.grad = None
        rx.sum(x * y * y).backward()
        y.grad = y.grad * 0.5

    for f in (clears, forgets, halves):
        found = []
        for run in (f, rx.jit(f)):
            x, y = (rx.Tensor(np.array([1.0, 2.0]) + i, requires_grad=True) for i in range(2))
            for _ in range(3):
                run(x, y)
            found.append((x.grad, y.grad))
        assert not run.reasons
        for want, got in zip(*found, strict=True):
            if want is None:
                assert got is None
            else:
                assert_close(got, want, exact=True)


def test_the_gradient_that_an_argument_came_with_is_read_by_the_step_itself():
    def step(x):
        rx.sum(x * x).backward()
        return x.grad

    x = rx.Tensor(np.array([1.0, 2.0]), requires_grad=True)
    run = rx.jit(step)
    with pytest.warns(RuntimeWarning, match="reads the gradient that an argument came with"):
        run(x)
    assert_close(run(x), np.array([4.0, 8.0]))


def test_gradients_of_one_sum_are_apart():
    a, b = (rx.Tensor(np.ones(3), requires_grad=True) for _ in range(2))

    @rx.jit
    def step(x):
        rx.sum((a + b) * x).backward()

    step(np.arange(3.0))
    a.grad[0] = 7
    assert_close(b.grad, np.arange(3.0))


def test_gradients_are_those_that_the_optimizer_saw():
    """The same arrays: copies would take time."""
    run = Training()
    params = list(run.model.parameters())
    seen = []
    inner = run.optimizer._step

    def noted(scaling):
        seen[:] = [p.grad for p in params]
        return inner(scaling)

    run.optimizer._step = noted
    jitted = rx.jit(run.step)
    for _ in range(2):
        jitted(X, LABELS)
        assert len(seen) == len(params)
        assert all(p.grad is g for p, g in zip(params, seen, strict=True))
    assert not jitted.reasons


@pytest.mark.parametrize("clears", [False, True], ids=["kept", "cleared"])
def test_whether_there_is_a_gradient_is_asked_each_time(clears):
    """The first call finds none, later ones those of the call before, or of a call without."""

    def of(jit):
        w = rx.Tensor(np.array([3.0, 4.0]), requires_grad=True)

        def step(x):
            norm = optim.clip_grad_norm([w], 1.0)
            there = 0.0 if w.grad is None else 1.0
            if clears:
                w.grad = None
            rx.sum(w * x).backward()
            return norm + there

        run = rx.jit(step) if jit else step
        found = []
        for i in range(5):
            if i == 3:
                w.grad = None
            found += [run(np.array([2.0, 1.0])), w.grad]
        return found

    for got, want in zip(of(True), of(False), strict=True):
        assert_close(got, want)


def test_a_tensor_that_is_given_twice_has_one_gradient():
    def of(jit):
        def step(x, y):
            x.grad = y.grad = None
            rx.sum(x * x * y).backward()
            optim.clip_grad_norm([x, y], 1.0)

        run = rx.jit(step) if jit else step
        first, second = (rx.Tensor(np.array([3.0, n]), requires_grad=True) for n in (4.0, 5.0))
        found = []
        for pair in ((first, first), (first, second), (second, second), (first, second)):
            run(*pair)
            found += [first.grad, second.grad]
        return found[:1] + found[2:]

    for got, want in zip(of(True), of(False), strict=True):
        assert_close(got, want)


def test_what_asks_for_values_runs_as_it_is():
    run = Training()
    seen = []

    def step(x, labels):
        loss = run.step(x, labels)
        seen.append(loss.item())
        return loss

    jitted = rx.jit(step)
    with pytest.warns(RuntimeWarning, match="needs the values"):
        jitted(X, LABELS)
    jitted(X, LABELS)
    assert len(seen) == 2
    assert seen[1] < seen[0]
    assert all(isinstance(p.data, np.ndarray) for p in run.model.parameters())
    assert all(isinstance(p.grad, np.ndarray) for p in run.model.parameters())


def test_a_parameter_after_its_optimizer():
    run = Training()

    @rx.jit
    def step(x, labels):
        run.step(x, labels)
        return run.loss(x, labels)

    with pytest.warns(RuntimeWarning, match="what an optimizer or an average has changed"):
        after = step(X, LABELS)
    assert_close(after.data, run.loss(X, LABELS).data)


def test_an_error_leaves_tensors_as_they_were():
    run = Training()
    run.step(X, LABELS)
    before = run.state()

    @rx.jit
    def step(x, labels):
        run.loss(x, labels).backward()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step(X, LABELS)
    for name, p in run.model.named_parameters():
        assert p.data is before[name]
        assert isinstance(p.grad, np.ndarray)


def test_the_rate_may_be_set_between_steps():
    runs = []
    for _ in range(2):
        rx.random.seed(0)
        runs.append(Training())
    steps = runs[0].step, rx.jit(runs[1].step)
    for rate in (1e-2, 1e-3, 1e-1):
        for run, step in zip(runs, steps, strict=True):
            run.optimizer.lr = rate
            step(X, LABELS)
    assert steps[1].n_traces == 1
    for a, b in zip(*(run.model.parameters() for run in runs), strict=True):
        assert_close(a.data, b.data, exact=True)


def test_training_and_evaluation_are_two_programs():
    run = Dropout()
    evaluate = rx.jit(lambda x: run.model(x))
    first = evaluate(X)
    run.model.eval()
    assert_close(evaluate(X).data, evaluate(X).data, exact=True)
    run.model.train()
    assert not np.array_equal(evaluate(X).data, first.data)


def scaled_step(dtype, *, clipped=False, **settings):
    """Return a training step whose loss is scaled."""
    rx.random.seed(0)
    model = perceptron(dtype=dtype)
    optimizer = optim.SGD(model.parameters(), 0.1)
    scaler = optim.LossScaler(**{"initial_scale": 1024.0, **settings})

    def step(x, labels):
        optimizer.zero_grad()
        loss = rx.cross_entropy(model(x), labels)
        scaler.scale(loss).backward()
        if clipped:
            scaler.unscale(optimizer)
            optim.clip_grad_norm(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss

    step.scaler = scaler
    return step


def test_a_loss_scaler():
    step, run = scaled_step(rx.float16), rx.jit(scaled_step(rx.float16))
    x = X.astype(np.float16)
    for _ in range(4):
        want = step(x, LABELS).data
        assert_close(run(x, LABELS).data, want)
    assert (run.n_eager, run.reasons) == (1, {})  # the first, which begins


def test_a_loss_scaler_that_is_there_from_the_start():
    run = rx.jit(scaled_step(rx.float16, clipped=True, device="cpu"))
    run(X.astype(np.float16), LABELS)
    assert (run.n_eager, run.reasons) == (0, {})


@pytest.mark.parametrize("growth_interval", [1, 3])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_unscaled_gradients_are_clipped(device, growth_interval):
    """Also in steps whose gradients overflow, as the scale grows until they do."""
    settings = {"clipped": True, "growth": 64.0, "growth_interval": growth_interval}
    with rx.device(device), np.errstate(over="ignore", invalid="ignore"):
        step, other = (scaled_step(rx.float16, **settings) for _ in range(2))
        run = rx.jit(other)
        x, labels = (rx.to_device(a, device) for a in (X.astype("float16"), LABELS))
        scales = []
        for _ in range(12):
            want = step(x, labels).data
            assert_close(run(x, labels).data, want)
            scales.append(float(step.scaler.current))
            assert float(other.scaler.current) == scales[-1]
    assert run.reasons == {}
    assert max(scales) > min(scales[scales.index(max(scales)) :])  # it grew, and shrank


@pytest.mark.gpu
def test_a_step_is_not_traced_while_it_is_captured():
    """A scaler is another one after its first step: the step is traced anew, and captured later."""
    pytest.importorskip("cupy")
    with rx.device("cuda:0"):
        step, run = scaled_step(rx.float32), rx.jit(scaled_step(rx.float32))
        x, labels = rx.to_device(X, "cuda:0"), rx.to_device(LABELS, "cuda:0")
        for _ in range(6):
            want = step(x, labels).item()
            assert_close(run(x, labels).item(), want, rtol=1e-5)
    assert run.reasons == {}
    assert run._captured.n_captures == 1


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True])
def test_gradients_are_clipped_together_on_a_gpu(capture):
    """By the kernels of a step that is not traced, which take all at once."""
    pytest.importorskip("cupy")
    with rx.device("cuda:0"):
        rx.random.seed(0)
        plain = Clipped()
        rx.random.seed(0)
        run = rx.jit(Clipped().step, capture=capture)
        x, labels = rx.to_device(X, "cuda:0"), rx.to_device(LABELS, "cuda:0")
        for _ in range(5):
            want, got = plain.step(x, labels), run(x, labels)
            assert_close(got["norm"], want["norm"], rtol=1e-5)
            assert_close(got["loss"].data, want["loss"].data, rtol=1e-5)
    assert run.reasons == {}
    assert "computes clipped" in str(run.explain())


def test_a_step_that_is_recorded_says_that_it_is_not_known_yet():
    made = rx.jit(lambda x: rx.tanh(x) * 2)
    x = np.ones(3, "float32")
    made._captured.is_recording = True
    with pytest.raises(Unsettled):
        made(x)
    made._captured.is_recording = False
    want = made(x)
    made._captured.is_recording = True
    assert_close(made(x), want, exact=True)
    assert made.n_traces == 1


def test_steps_in_threads():
    from concurrent.futures import ThreadPoolExecutor

    weight = rx.Tensor(np.ones(5), requires_grad=True)
    step = rx.jit(lambda x: rx.sum(rx.tanh(weight * x)))
    xs = [np.full((n % 4 + 1, 5), float(n)) for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(step, xs))
    for x, out in zip(xs, found, strict=True):
        assert_close(out.data, np.sum(np.tanh(x)))
