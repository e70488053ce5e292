"""Work that runs ahead: the order, the places of errors, how far ahead, and that no thread is left behind."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing, suppress
from contextvars import ContextVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protodcs import prefetch
from protodcs.errors import UsageError
from protodcs.prefetch import Prefetcher

# Seconds after which a test gives up: only a program that hangs takes so long.
HANG = 300


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "protodcs-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not workers()
    yield
    assert not workers()


def doubled(items):
    for item in items:
        yield 2 * item


def in_pairs(items):
    pair = []
    for item in items:
        pair.append(item)
        if len(pair) == 2:
            yield pair
            pair = []


class Counted:
    """An iterator that counts what was taken from it."""

    def __init__(self, items):
        self.items, self.taken = iter(items), 0

    def __iter__(self):
        return self

    def __next__(self):
        item = next(self.items)
        self.taken += 1
        return item

    def settled(self, expected):
        """Wait until so many were taken, and a little longer: whether no more are."""
        end = time.monotonic() + HANG
        while self.taken < expected and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.05)
        return self.taken == expected


def test_results_come_in_order_and_then_the_end_for_ever():
    results = Prefetcher(doubled, range(100), 2)
    assert list(results) == list(range(0, 200, 2))
    assert list(results) == []


def test_nothing_comes_of_nothing():
    assert list(Prefetcher(doubled, [], 2)) == []


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_more_than_the_limit_is_made_beyond_what_was_taken(limit):
    source = Counted(itertools.count())
    with closing(Prefetcher(in_pairs, source, limit)) as results:
        assert source.settled(2 * limit)
        for taken in range(1, 4):
            next(results)
            assert source.settled(2 * (taken + limit))


def test_a_result_is_there_before_the_next_item_is():
    gate = threading.Event()

    def items():
        yield 1
        gate.wait()
        yield 2

    with closing(Prefetcher(doubled, items(), 2)) as results:
        assert next(results) == 2
        gate.set()
        assert next(results) == 4


def test_work_and_reader_run_at_the_same_time():
    meeting = threading.Barrier(2, timeout=HANG)

    def work(items):
        for item in items:
            if item:
                meeting.wait()
            yield item

    with closing(Prefetcher(work, [0, 1], 2)) as results:
        next(results)
        # Sequential work would not start on the second item before this returns.
        meeting.wait()
        assert next(results) == 1


@pytest.mark.parametrize("where", ["items", "work", "start of items", "start of work"])
def test_an_error_comes_out_at_its_place_with_its_own_traceback(where):
    def items():
        if where == "start of items":
            raise ValueError(where)
        yield from range(5)
        if where == "items":
            raise ValueError(where)

    def work(items):
        for item in items:
            yield item
            if item == 4 and where == "work":
                raise ValueError(where)

    def no_work(items):
        raise ValueError(where)

    results = Prefetcher(no_work if where == "start of work" else work, items(), 2)
    taken = []
    with pytest.raises(ValueError, match=where) as raised:
        taken.extend(results)
    assert taken == ([] if "start" in where else list(range(5)))
    assert raised.traceback[-1].name in ("items", "work", "no_work")
    assert list(results) == []


def test_what_is_no_iterable_is_a_type_error():
    with pytest.raises(TypeError, match="not iterable"):
        next(Prefetcher(doubled, None, 2))


def test_an_exit_inside_the_items_reaches_the_reader():
    def items():
        yield 1
        sys.exit("enough")

    results = Prefetcher(doubled, items(), 2)
    assert next(results) == 2
    with pytest.raises(SystemExit, match="enough"):
        next(results)


@given(
    items=st.integers(0, 40),
    limit=st.integers(1, 4),
    fails=st.none() | st.integers(0, 40),
    work_fails=st.none() | st.integers(0, 20),
    stops=st.none() | st.integers(0, 25),
    dropped=st.booleans(),
)
def test_a_reader_sees_what_it_would_see_without_a_thread(items, limit, fails, work_fails, stops, dropped):
    def source():
        for item in range(items):
            if item == fails:
                raise ValueError("item")
            yield item

    def work(numbers):
        for number, pair in enumerate(in_pairs(numbers)):
            if number == work_fails:
                raise RuntimeError("work")
            yield pair

    def seen(results):
        taken = []
        try:
            taken.extend(itertools.islice(results, stops))
        except (ValueError, RuntimeError) as error:
            taken.append(repr(error))
        return taken

    counted = Counted(source())
    results = Prefetcher(work, counted, limit)
    assert seen(results) == seen(work(source()))
    if not dropped:
        results.close()
        assert list(results) == []
    del results
    assert not workers()
    if stops is not None:
        assert counted.taken <= 2 * (stops + limit)


def test_an_endless_reader_is_stopped_in_the_middle_of_a_result():
    def never_done(items):
        for _ in items:
            pass
        yield

    results = Prefetcher(never_done, itertools.count(), 2)
    results.close()
    assert not workers()


@pytest.mark.parametrize("what", ["an item", "an error", "the end"])
def test_nothing_is_made_of_what_comes_when_the_reader_has_gone(what):
    blocked, gate, made = threading.Event(), threading.Event(), []

    def items():
        yield 1
        blocked.set()
        gate.wait()
        if what == "an error":
            raise ValueError
        if what == "an item":
            yield 2

    def stubborn(items):
        with suppress(Exception):
            for _ in items:
                pass
        made.append("what was left")
        yield

    results = Prefetcher(stubborn, items(), 2)
    blocked.wait()
    results.close()
    (left,) = workers()
    gate.set()
    left.join()
    assert made == []


def test_items_that_block_before_the_first_hold_nobody_up():
    blocked, gate = threading.Event(), threading.Event()

    class Slow:
        def __iter__(self):
            blocked.set()
            gate.wait()
            return iter([1])

    results = Prefetcher(doubled, Slow(), 2)
    blocked.wait()
    results.close()
    (left,) = workers()
    gate.set()
    left.join()


def test_a_result_in_the_making_is_waited_for():
    begun, done = threading.Event(), []

    def slow(items):
        for item in items:
            begun.set()
            time.sleep(3 * prefetch.STOP_TIMEOUT)
            done.append(item)
            yield item

    results = Prefetcher(slow, itertools.count(), 2)
    begun.wait()
    results.close()
    assert done == [0]
    assert not workers()


def test_a_blocked_item_holds_nobody_up_and_its_thread_ends_when_it_comes():
    blocked, gate, closed = threading.Event(), threading.Event(), []

    def items():
        try:
            yield 1
            blocked.set()
            gate.wait()
            yield 2
        finally:
            closed.append(threading.current_thread().name)

    results = Prefetcher(doubled, items(), 2)
    assert next(results) == 2
    blocked.wait()
    results.close()
    (left,) = workers()
    gate.set()
    left.join()
    assert closed == ["protodcs-prefetch"]


def test_items_are_closed_when_their_reader_stops():
    closed = []

    def items():
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    results = Prefetcher(doubled, items(), 2)
    next(results)
    results.close()
    assert closed == [True]


def test_a_reader_in_a_circle_is_stopped_when_it_is_collected():
    circle = [Prefetcher(doubled, itertools.count(), 2)]
    circle.append(circle)
    next(circle[0])
    del circle
    gc.collect()
    assert not workers()


def test_a_reader_may_be_collected_inside_its_own_thread():
    circle = []
    ready = threading.Event()

    def items():
        yield 1
        ready.wait()
        gc.collect()
        yield from itertools.count()

    gc.disable()
    try:
        circle += [Prefetcher(doubled, items(), 2), circle]
        next(circle[0])
        (thread,) = workers()
        del circle
        ready.set()
        thread.join()
    finally:
        gc.enable()


def test_the_end_of_a_reader_wakes_who_waits_for_it():
    gate = threading.Event()

    def items():
        gate.wait()
        yield 1

    results = Prefetcher(doubled, items(), 2)
    taken = []
    waiting = threading.Thread(target=lambda: taken.extend(results))
    waiting.start()
    results.close()
    gate.set()
    waiting.join()
    assert taken == []


def test_items_are_read_in_the_context_of_the_caller():
    variable = ContextVar("variable")
    variable.set("mine")
    with closing(Prefetcher(lambda items: map(ContextVar.get, items), [variable], 1)) as results:
        assert next(results) == "mine"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_is_told_that_its_thread_is_gone():
    gate = threading.Event()

    def items():
        gate.wait()
        yield 1

    with closing(Prefetcher(doubled, items(), 2)) as results:
        child = os.fork()
        if child == 0:
            try:
                next(results)
            except UsageError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        gate.set()


def script(words, **options):
    """Run a program that reads ahead; `items` blocks for ever after its first item."""
    head = """
        import itertools, signal, sys, threading, time
        from protodcs.prefetch import Prefetcher
        def items():
            yield 1
            threading.Event().wait()
    """
    whole = textwrap.dedent(head) + textwrap.dedent(words)
    return subprocess.Popen(
        [sys.executable, "-c", whole], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.parametrize(
    "items", ["items()", "itertools.count()", "map(lambda _: time.sleep(0.01), itertools.count())"]
)
def test_a_program_ends_although_its_reader_has_not(items):
    child = script(f"""
        results = Prefetcher(iter, {items}, 2)
        next(results)
        print("done")
    """)
    output, errors = child.communicate(timeout=HANG)
    assert (child.returncode, output, errors) == (0, "done\n", "")


def test_a_program_ends_only_after_the_result_that_its_thread_works_on():
    child = script("""
        begun = threading.Event()
        def work(items):
            for item in items:
                yield item
                begun.set()
                time.sleep(1)
                print("worked", flush=True)
        results = Prefetcher(work, itertools.count(), 2)
        next(results)
        begun.wait()
    """)
    output, errors = child.communicate(timeout=HANG)
    assert (child.returncode, output, errors) == (0, "worked\n", "")


def test_an_interrupt_from_the_keyboard_reaches_a_reader_that_waits():
    child = script("""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        results = Prefetcher(iter, items(), 2)
        try:
            print(next(results), flush=True)
            next(results)
        except KeyboardInterrupt:
            results.close()
            print("interrupted")
    """)
    assert child.stdout.readline() == "1\n"
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=HANG)
    assert (child.returncode, output, errors) == (0, "interrupted\n", "")


def test_it_says_whether_the_next_result_or_the_end_is_there():
    gate = threading.Event()

    def items():
        yield 1
        gate.wait()

    with closing(Prefetcher(iter, items(), 4)) as results:
        assert next(results) == 1
        assert not results.waiting
        gate.set()
        end = time.monotonic() + HANG
        while not results.waiting:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert next(results, None) is None
        assert not results.waiting
