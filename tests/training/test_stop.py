"""Signals: at once outside of the steps, after the step inside."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from optstream.training.stop import Stopped, StopRequest

SIGNALS = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])


@SIGNALS
def test_during_set_up_it_stops_at_once(signum):
    with StopRequest(), pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), signum)
    assert stopped.value.signum == signum


@SIGNALS
def test_during_steps_it_is_noted_and_the_second_one_stops(signum):
    with StopRequest() as stop, stop.deferred():
        assert stop.signum is None
        os.kill(os.getpid(), signum)
        assert stop.signum == signum
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signum)  # ignored: the run is closing what it opened


def test_after_the_steps_it_stops_at_once_again():
    with StopRequest() as stop:
        with stop.deferred():
            pass
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_outside_of_the_main_thread_no_handler_is_set():
    handlers = []

    def enter() -> None:
        with StopRequest():
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_an_error_that_somebody_made_of_it_is_still_the_signal():
    """As an import does that fails half-way."""

    def swallow() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:
            raise ModuleNotFoundError("no module") from error

    with pytest.raises(Stopped), StopRequest():
        swallow()
