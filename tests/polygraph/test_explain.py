"""What explain and profile say of fused functions, and the pages they write."""

import html.parser
import re

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph._explain import in_bytes, in_time
from rtxarr.polygraph._layout import arrange


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((64, 100), "f4")


def test_a_kernel_is_explained_by_its_operations_and_bytes(x):
    fused = rx.fuse(softmax)
    fused(x)
    text = fused.explain()
    (step,) = text.programs[0].steps
    assert step.kind == "rows"
    assert step.operations == ["max", "subtract", "exp", "sum", "divide"]
    assert step.n_bytes == 2 * x.nbytes
    # max: x, subtract: x and result, exp: 2, sum: 1, divide: 2; and the rows' four.
    assert step.n_bytes_apart == 8 * x.nbytes + 4 * 64 * 4
    assert "64 rows of 100" in text
    assert "moves 51.2 kB (one operation at a time: 206 kB)" in text
    assert "def program(x0):" in text


def test_why_results_are_kept(x):
    def f(x, w):
        y = np.tanh(x) + 1
        return y @ w, y.sum(axis=0) @ w

    fused = rx.fuse(f)
    fused(x, np.ones((100, 3), "f4"))
    (report,) = fused.explain().programs
    reasons = {n.shape: why for s in report.steps for n, why in s.why.items()}
    assert reasons[64, 100] == "read by matmul"
    matmuls = [s for s in report.steps if s.operations == ["matmul"]]
    assert {s.title for s in matmuls} == {"run by a library"}


def test_a_call_of_several_results_and_the_step_that_takes_one(x):
    fused = rx.fuse(lambda x: rx.argsort(x, axis=-1) + 1)
    fused(x)
    text = fused.explain()
    call, item, _ = text.programs[0].steps
    assert (call.title, item.title) == ("run by a library", "one of several arrays")
    assert [name for name, _ in item.reads] == [name for name, _ in call.writes] == ["v1"]
    assert "reads nothing" not in text


def test_sources_are_shown_on_demand(x):
    fused = rx.fuse(softmax)
    fused(x)
    assert "@kernel" not in fused.explain()
    assert "@kernel" in fused.explain(source=True)


def test_before_the_first_call():
    assert "it has not been called" in rx.fuse(softmax).explain()


@pytest.mark.filterwarnings("ignore:.*is not fused:RuntimeWarning")
def test_what_was_not_fused_is_named(x):
    fused = rx.fuse(lambda x: x[x > 0])
    fused(x)
    assert "eager: " in fused.explain()
    assert fused.explain().endswith("(1 kind of calls)")
    with pytest.raises(ValueError, match="runs as it is"):
        fused.profile(x)


def test_forward_and_backward_passes():
    @rx.fuse
    def f(t):
        return rx.sum(rx.tanh(t) * t)

    t = rx.autograd.Tensor(np.linspace(0, 1, 50, dtype="f4"), requires_grad=True)
    f(t).backward()
    titles = [report.title for report in f.explain().programs]
    assert titles == ["program 1, forward", "program 1, backward"]


class Checker(html.parser.HTMLParser):
    """Reads a page and checks that its tags match."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(path):
    checker = Checker()
    text = path.read_text(encoding="utf-8")
    checker.feed(text)
    assert not checker.open
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # needs no other file
    return text, checker.seen


def test_a_page_with_a_picture(x, tmp_path):
    fused = rx.fuse(lambda x, w: softmax(x) @ w + 1)
    fused(x, np.ones((100, 3), "f4"))
    fused.explain(html=tmp_path / "page.html")
    text, tags = read(tmp_path / "page.html")
    assert tags.count("svg") == 1
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert {"max", "exp", "divide", "matmul", "add 1.0"} <= set(labels)
    assert text.count("marker-end") == 5  # from two arguments, by three steps, to a result
    assert "@kernel" in text


def test_a_step_with_many_operations_lists_them(x, tmp_path):
    def f(x):
        for _ in range(35):
            x = np.sin(np.cos(x))
        return x

    fused = rx.fuse(f)
    fused(x)
    fused.explain(html=tmp_path / "page.html")
    text, _ = read(tmp_path / "page.html")
    assert "cos x 35, sin x 35" in text


def test_profile_measures_each_step(x, tmp_path):
    fused = rx.fuse(lambda x, w: softmax(x) @ w + 1)
    w = np.ones((100, 3), "f4")
    profile = fused.profile(x, w, rounds=5, html=tmp_path / "page.html")
    names = [step.name for step in profile.program.steps]
    assert list(profile.seconds) == names
    assert all(len(times) == 5 and min(times) > 0 for times in profile.seconds.values())
    assert all(name in profile for name in names)
    text, _ = read(tmp_path / "page.html")
    assert "quartiles" in text
    np.testing.assert_array_equal(fused(x, w), softmax(x) @ w + 1)  # runs as before


def test_profile_takes_the_program_of_its_arguments(x):
    fused = rx.fuse(softmax)
    fused(x)
    profile = fused.profile(x.astype("f8"), rounds=1)
    assert profile.program.steps[0].reads[0][1].dtype == np.float64


def test_numbers_are_short():
    assert [in_bytes(n) for n in (12, 1234, 5e6, 7.5e12)] == [
        "12 bytes",
        "1.23 kB",
        "5 MB",
        "7.5e+03 GB",
    ]
    assert [in_time(t) for t in (2, 0.012, 3.4e-5, 1e-8)] == ["2 s", "12 ms", "34 us", "0.01 us"]


def test_layers_stand_below_what_they_read():
    sources = {"a": [], "b": [], "c": ["a"], "d": ["c", "b"], "e": ["a", "d"]}
    sizes = dict.fromkeys(sources, (50.0, 20.0))
    found = arrange(list(sources), sources, sizes, across=10, between=30)
    y = {item: corner[1] for item, corner in found.corners.items()}
    assert (y["a"], y["c"], y["d"], y["e"]) == (0, 50, 100, 150)
    assert y["b"] == 50  # just above what reads it
    boxes = [(*found.corners[i], *sizes[i]) for i in sources]
    for k, (x, top, w, _) in enumerate(boxes):
        for u, other, v, _ in boxes[:k]:
            assert top != other or x >= u + v + 10 or u >= x + w + 10
    route = found.routes["a", "e"]
    assert len(route) == 7  # past two layers
    assert [p[1] for p in route] == sorted(p[1] for p in route)
    for x, top, w, h in boxes:  # no line goes through a box
        assert not any(x < a < x + w and top < b < top + h for a, b in route)
