import pytest

from tba.plan.clockwork import Kind, Processors, Signal, Timers, play, run_process


def finished(processors: Processors, jobs: list[tuple[Kind, float]]) -> list[float]:
    """Return when jobs that begin together are done, in the order given."""
    timers, done_s = Timers(), [-1.0] * len(jobs)

    def job(number: int, kind: Kind, seconds: float):
        yield processors.work(kind, seconds)
        done_s[number] = timers.now_s

    for number, (kind, seconds) in enumerate(jobs):
        run_process(job(number, kind, seconds))
    play(timers, [processors], until=lambda: False)
    return done_s


@pytest.mark.parametrize(("jobs", "places"), [(1, 2), (2, 2), (3, 2), (5, 2), (7, 1)])
def test_n_equal_threads_on_c_places_take_n_over_c_times_as_long(jobs, places):
    done_s = finished(Processors(places), [(Kind.SEARCHER, 3.0)] * jobs)
    assert done_s == pytest.approx([3.0 * max(1.0, jobs / places)] * jobs)


def test_a_short_job_leaves_its_share_to_the_rest():
    # at half speed until the first is done at 2 s, which leaves 3 - 1 s of the second's work
    assert finished(Processors(1), [(Kind.SEARCHER, 1.0), (Kind.SEARCHER, 3.0)]) == [2.0, 4.0]


def test_kinds_slow_down_each_in_its_measure_as_soon_as_two_are_busy():
    processors = Processors(2, (1.5, 1.0, 2.0))
    # until 3 s both are slow: 2 / 1.5 ... the trainer needs 3 s, the searcher has done 1.5 of its 4
    done_s = finished(processors, [(Kind.INTERPRETER, 2.0), (Kind.SEARCHER, 4.0)])
    assert done_s == pytest.approx([3.0, 3.0 + 2.5])


def test_threads_of_one_interpreter_take_turns_and_hashing_does_not():
    jobs = [(Kind.INTERPRETER, 1.0), (Kind.INTERPRETER, 1.0), (Kind.NATIVE, 1.0)]
    assert finished(Processors(8), jobs) == pytest.approx([2.0, 2.0, 1.0])


def test_a_signal_wakes_those_who_wait_and_no_later_ones():
    timers, signal, woken = Timers(), Signal(), []

    def waiter(name: str, from_s: float):
        yield timers.sleep(from_s)
        yield signal
        woken.append((name, timers.now_s))

    def firer():
        yield timers.sleep(2.0)
        signal.fire()

    for process in (waiter("early", 1.0), waiter("late", 3.0), firer()):
        run_process(process)
    play(timers, [], until=lambda: False)
    assert woken == [("early", 2.0)]
