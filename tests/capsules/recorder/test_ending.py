"""By what a recording ends: an exception on its way out, and not one that the job deals with."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from llmconsole.capsules import Capsule
from llmconsole.capsules.recorder.ending import under_way

Close = Callable[[], None]


def fail() -> None:
    raise ValueError("bad batch")


# -- jobs that are closed while an exception is on its way out


def in_finally(close: Close) -> None:
    try:
        fail()
    finally:
        close()


def in_a_finally_with_more_in_it(close: Close) -> None:
    try:
        fail()
    finally:
        with contextlib.suppress(KeyError):
            int("3")
        for number in range(2):
            if number:
                close()
        with contextlib.suppress(KeyError):
            {}["a"]


def by_a_function_called_in_finally(close: Close) -> None:
    def shut() -> None:
        close()

    try:
        fail()
    finally:
        shut()


def in_a_handler_that_raises_again(close: Close) -> None:
    try:
        fail()
    except ValueError:
        close()
        raise


def in_a_handler_that_raises_another(close: Close) -> None:
    try:
        fail()
    except ValueError as error:
        close()
        raise RuntimeError("training failed") from error


def by_the_end_of_a_with(close: Close) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(close)
        fail()


def in_a_context_manager(close: Close) -> None:
    @contextlib.contextmanager
    def recorded() -> Generator[None]:
        try:
            yield
        finally:
            close()

    with recorded():
        fail()


def inside_the_handler_of_another(close: Close) -> None:
    try:
        {}["a"]
    except KeyError:
        in_finally(close)


# -- jobs that go on


def in_a_handler(close: Close) -> None:
    try:
        fail()
    except ValueError:
        close()


def in_a_handler_that_may_raise(close: Close) -> None:
    try:
        fail()
    except ValueError as error:
        close()
        if error.args != ("bad batch",):
            raise


def in_a_finally_that_returns(close: Close) -> int:
    for _ in range(2):
        try:
            fail()
        finally:
            close()
            break  # noqa: B012
    return 3


def by_a_function_called_in_a_handler(close: Close) -> None:
    try:
        fail()
    except ValueError:

        def shut() -> None:
            try:
                int("3")
            finally:
                close()

        shut()


OUT = (
    *(in_finally, in_a_finally_with_more_in_it, by_a_function_called_in_finally, in_a_handler_that_raises_again),
    *(in_a_handler_that_raises_another, by_the_end_of_a_with, in_a_context_manager, inside_the_handler_of_another),
)
ON = (in_a_handler, in_a_handler_that_may_raise, in_a_finally_that_returns, by_a_function_called_in_a_handler)


@pytest.mark.parametrize(("job", "passing"), [(job, job in OUT) for job in (*OUT, *ON)])
def test_an_exception_on_its_way_out_is_told_from_one_that_is_dealt_with(job: Any, passing: bool) -> None:
    found = []
    with contextlib.suppress(ValueError, RuntimeError):
        job(lambda: found.append(under_way(0)))
    ((error, out),) = found
    assert (type(error), out) == (ValueError, passing)


def test_no_exception_is_none() -> None:
    assert under_way(0) is None


# -- what the capsule says


def ended(recording: Any, job: Callable[[Close], object], *expected: type[BaseException]) -> tuple[Capsule, list[str]]:
    """The capsule after ``job``, and the messages of its log."""
    recording.train(2)
    with contextlib.suppress(*expected):
        job(recording.recorder.close)
    assert not recording.recorder.recording
    capsule = recording.capsule()
    return capsule, [e["message"] for e in capsule.records("events") if e["kind"] == "log" and e["level"] == "warning"]


@pytest.mark.parametrize("job", OUT)
def test_an_exception_under_close_is_in_the_capsule(run: Any, job: Any) -> None:
    capsule, _ = ended(run(), job, ValueError, RuntimeError)
    assert (capsule.status, capsule.trigger.kind, capsule.trigger.step) == ("crashed", "exception", 1)
    (event,) = [event for event in capsule.records("events") if event["kind"] == "exception"]
    assert (event["type"], event["message"], event["frames"][0]["name"]) == ("ValueError", "bad batch", "fail")


@pytest.mark.parametrize("job", ON)
def test_one_that_is_dealt_with_is_a_remark(run: Any, job: Any) -> None:
    capsule, said = ended(run(), job)
    assert (capsule.status, capsule.trigger) == ("sealed", None)
    assert said == ["closed while ValueError was handled: bad batch"]


def test_data_that_ends_by_an_exception_is_a_good_end(run: Any) -> None:
    def job(close: Close) -> None:
        batches = iter([1])
        while True:
            try:
                next(batches)
            except StopIteration:
                close()
                break

    capsule, said = ended(run(), job)
    assert (capsule.status, capsule.trigger, said) == ("sealed", None, [])


def test_data_that_ends_within_a_step_is_a_good_end(run: Any, gpt: Any) -> None:
    recording = run()
    batches = iter([gpt.shifted(0)])
    with contextlib.suppress(StopIteration):
        while True:
            with recording.recorder.step():
                inputs, targets = next(batches)
                gpt.cross_entropy(recording.model(inputs), targets).backward()
                recording.optimizer.step()
    capsule = recording.capsule()
    assert (capsule.status, capsule.trigger) == ("sealed", None)
    assert len(capsule.scalars("loss")) == 1


def test_a_generator_that_nobody_wants_any_more_is_a_good_end(run: Any) -> None:
    def job(close: Close) -> None:
        def steps() -> Iterator[int]:
            try:
                yield 1
            finally:
                close()

        some = steps()
        next(some)
        some.close()

    capsule, said = ended(run(), job)
    assert (capsule.status, capsule.trigger, said) == ("sealed", None, [])


def test_what_the_job_trained_under_is_not_what_ends_it(run: Any) -> None:
    def job(close: Close) -> None:
        try:
            fail()
        except ValueError:
            recording.train(2)
            close()
            raise

    recording = run()
    capsule, said = ended(recording, job, ValueError)
    assert (capsule.status, capsule.trigger, said) == ("sealed", None, [])
    assert len(capsule.scalars("loss")) == 4


def test_a_job_inside_a_handler_ends_well(run: Any) -> None:
    try:
        {}["flash attention"]
    except KeyError:
        recording = run()
        recording.recorder.close()
    assert recording.capsule().status == "sealed"


def test_an_exception_that_a_step_has_told_is_told_once(run: Any, gpt: Any) -> None:
    def job(close: Close) -> None:
        try:
            with recording.recorder.step(batch=gpt.shifted(3)):
                fail()
        finally:
            close()

    recording = run()
    capsule, _ = ended(recording, job, ValueError)
    assert capsule.status == "crashed"
    assert len([event for event in capsule.records("events") if event["kind"] == "exception"]) == 1


class TestExitsAndInterrupts:
    @pytest.mark.parametrize("code", [None, 0])
    def test_an_exit_without_a_status_is_a_good_end(self, run: Any, code: int | None) -> None:
        def job(close: Close) -> None:
            try:
                raise SystemExit(code)
            finally:
                close()

        capsule, said = ended(run(), job, SystemExit)
        assert (capsule.status, capsule.trigger, said) == ("sealed", None, [])

    def test_a_failing_exit_is_an_end_of_its_own(self, run: Any) -> None:
        def job(close: Close) -> None:
            try:
                raise SystemExit(3)
            finally:
                close()

        capsule, _ = ended(run(), job, SystemExit)
        assert (capsule.status, capsule.trigger.kind, capsule.trigger.message) == (
            "crashed",
            "exception",
            "SystemExit: 3",
        )

    @pytest.mark.parametrize(("code", "status"), [(0, "sealed"), (3, "crashed")])
    def test_an_exit_within_a_step_is_known_though_nobody_closes(self, job: Any, code: int, status: str) -> None:
        script = f"""
        import sys, torch
        from llmconsole.capsules import Recorder
        model = torch.nn.Linear(2, 2)
        recorder = Recorder(sys.argv[1], model=model)
        with recorder.step():
            model(torch.ones(1, 2)).sum().backward()
            sys.exit({code})
        """
        started = job(script)
        assert started.finish()[0] == code
        assert started.capsule().status == status

    def test_a_failing_exit_out_of_a_handler_is_the_exception_that_it_handles(self, run: Any) -> None:
        def job(close: Close) -> None:
            try:
                try:
                    fail()
                except ValueError:
                    raise SystemExit(1)  # noqa: B904
            finally:
                close()

        capsule, _ = ended(run(), job, SystemExit)
        assert capsule.trigger.message == "ValueError: bad batch"

    @pytest.mark.parametrize("status", [0, 1])
    def test_an_exit_by_the_handler_of_a_signal_is_that_signal(self, run: Any, status: int) -> None:
        def stop(number: int, frame: Any) -> None:
            raise SystemExit(status)

        def job(close: Close) -> None:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                close()

        before = signal.signal(signal.SIGTERM, stop)
        try:
            capsule, _ = ended(run(), job, SystemExit)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert (capsule.status, capsule.trigger.kind, capsule.trigger.signal) == ("sealed", "signal", "SIGTERM")

    @pytest.mark.parametrize("sent", [True, False])
    def test_an_interrupt_is_the_signal_that_it_stands_for(self, run: Any, sent: bool) -> None:
        def job(close: Close) -> None:
            try:
                if sent:
                    signal.raise_signal(signal.SIGINT)
                raise KeyboardInterrupt
            finally:
                close()

        capsule, _ = ended(run(), job, KeyboardInterrupt)
        assert (capsule.status, capsule.trigger.kind, capsule.trigger.signal) == ("sealed", "signal", "SIGINT")
        assert not [event for event in capsule.records("events") if event["kind"] == "exception"]
