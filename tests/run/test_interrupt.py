import signal

import pytest

from tba.run.interrupt import StopSignal


def test_before_the_first_step_it_ends_the_run_at_once():
    with StopSignal(tell=lambda text: None) as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.reason == "stopped by SIGINT"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_while_steps_are_taken_it_is_noted_told_and_obeyed_later(number):
    told = []
    with StopSignal(told.append) as stop:
        stop.stepping = True
        assert not stop()
        signal.raise_signal(number)
        assert stop()
        assert stop.reason == f"stopped by {number.name}"
    assert len(told) == 1
    assert "ending after this step" in told[0]


def test_a_second_ctrl_c_ends_it_at_once():
    with StopSignal(tell=lambda text: None) as stop:
        stop.stepping = True
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignal(tell=lambda text: None):
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
