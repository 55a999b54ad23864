"""What switches recording, for blocks, functions, generators and threads."""

import threading

import pytest

import rtxarr as rx


def test_no_grad_as_block_and_decorator_nests_and_restores():
    assert rx.is_recording()
    with rx.no_grad():
        assert not rx.is_recording()
        with rx.enable_grad():
            assert rx.is_recording()
        assert not rx.is_recording()

    @rx.no_grad
    def plain():
        return rx.is_recording()

    @rx.no_grad()
    def called():
        return rx.is_recording()

    assert not plain() and not called() and rx.is_recording()
    with pytest.raises(ZeroDivisionError), rx.no_grad():
        raise ZeroDivisionError
    assert rx.is_recording()


def test_recording_state_is_per_thread():
    seen = {}

    def other():
        seen["recording"] = rx.is_recording()

    with rx.no_grad():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen["recording"]


def test_a_decorated_generator_records_nothing_while_it_runs():
    seen, ended = [], []

    @rx.no_grad
    def items():
        try:
            for _ in range(2):
                seen.append((yield rx.is_recording()))
            return "end"
        except ValueError:
            yield "caught", rx.is_recording()
        finally:
            ended.append(rx.is_recording())

    def takes_all():
        return (yield from items())

    outer = takes_all()
    assert next(outer) is False
    assert rx.is_recording()
    assert outer.send("sent") is False
    with pytest.raises(StopIteration) as stop:
        next(outer)
    assert stop.value.value == "end"
    assert seen == ["sent", None]
    running = items()
    next(running)
    assert running.throw(ValueError) == ("caught", False)
    assert rx.is_recording()
    running.close()
    assert ended == [False, False]
    assert rx.is_recording()


def test_an_async_function_is_no_block():
    async def f():
        pass

    with pytest.raises(TypeError, match=r"must not be async, got f\(\)"):
        rx.no_grad(f)


def test_blocks_may_end_out_of_turn():
    def block():
        with rx.no_grad():
            yield

    first, second = block(), block()
    next(first), next(second)
    first.close()
    assert not rx.is_recording()
    second.close()
    assert rx.is_recording()


def test_a_block_that_ends_in_another_thread_changes_nothing_there():
    seen = []

    def begin():
        block = rx.no_grad()
        block.__enter__()
        seen.append(block)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    with rx.no_grad():
        seen[0].__exit__(None, None, None)
        assert not rx.is_recording()
    assert rx.is_recording()


def test_one_block_can_be_used_by_several_threads():
    off, inside, leave = rx.no_grad(), threading.Event(), threading.Event()

    def other():
        with off:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with rx.no_grad(), off:
        thread.start()
        inside.wait(10)
    leave.set()
    thread.join()
    assert rx.is_recording()
