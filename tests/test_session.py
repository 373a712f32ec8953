"""What a sitting makes of the sittings before it."""

from types import SimpleNamespace

import pytest

from factories import distinct
from tba.buffer import ReplayBuffer
from tba.run.checkpoint import steps_kept
from tba.run.rollouts import RolloutLog, encode
from tba.session import Session
from tiny_runs import tiny_config, train


def versions(buffer: ReplayBuffer) -> list[list[int]]:
    """Return the policy versions of each query's samples, oldest first."""
    return [
        buffer.field("policy_version", buffer.samples(number)).tolist()
        for number in range(len(buffer.queries_seen))
    ]


def test_versions_of_lost_futures_stay_capped_in_every_later_sitting(tmp_path):
    session = Session(tiny_config(tmp_path), folder=None, stop=None, progress=None)
    with RolloutLog(tmp_path / "log") as log:
        session._rollouts = log
        # First sitting: versions 4 and 9 were searched, its checkpoint is that of step 6.
        log.append(encode([*distinct(0, 2, version=4), *distinct(1, 2, version=9)]))
        rebuilt = session._rebuild_buffer(checkpoint(), version=6)
        assert versions(rebuilt.buffer) == [[4, 4], [6, 6]]
        assert session._resumptions == ((4, 6),)
        assert rebuilt.next_ticket == 10
        # Second sitting, from step 6 on: versions 8 and 20, checkpoint at step 14.
        log.append(encode([*distinct(2, 1, version=8), *distinct(3, 1, version=20)]))
        rebuilt = session._rebuild_buffer(checkpoint(session._resumptions), version=14)
        assert versions(rebuilt.buffer) == [[4, 4], [6, 6], [8], [14]]
        assert session._resumptions == ((4, 6), (6, 14))
        # Third sitting, checkpoint at step 30: 9 and 20 still mean nothing.
        log.append(encode(distinct(4, 1, version=25)))
        rebuilt = session._rebuild_buffer(checkpoint(session._resumptions), version=30)
        assert versions(rebuilt.buffer) == [[4, 4], [6, 6], [8], [14], [25]]
        assert rebuilt.next_ticket == 26


@pytest.mark.parametrize(("sync_every", "kept"), [(1, [3, 6, 7]), (2, [4, 7])])
def test_checkpoints_are_as_many_steps_apart_as_asked_the_first_one_too(tmp_path, sync_every, kept):
    config = tiny_config(
        tmp_path,
        trainer={"steps": 7},
        sync={"sync_every": sync_every},
        checkpoint={"every": 3, "keep": 9},
    )
    train(tmp_path, config)
    assert steps_kept(tmp_path / "run" / "checkpoints") == kept


def checkpoint(resumptions=()):
    """What of a checkpoint the buffer depends on; its own state is that no sample was used."""
    nothing_used = ReplayBuffer(100).state()
    return SimpleNamespace(
        state=SimpleNamespace(resumptions=resumptions), buffer=lambda: nothing_used
    )
