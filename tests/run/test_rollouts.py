import errno
import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.errors import RunFolderError, StorageError
from tba.records import FinishReason, Outcome, Score, Trajectory
from tba.run.rollouts import SCHEMA, RolloutLog, decode, encode, from_bytes, read_log, to_bytes
from tests.factories import distinct, excluded, trajectory

BATCHES = [encode([*distinct(q, 3, version=q), excluded(q)]) for q in range(3)]
MESSAGES = [to_bytes(batch) for batch in BATCHES]


def floats(size):
    return st.lists(st.floats(width=32), min_size=size, max_size=size).map(np.float32)


@st.composite
def trajectories(draw):
    tokens = np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=5)), dtype=np.int32)
    return Trajectory(
        query_id=draw(st.integers(0, 2**40)),
        prompt_ids=np.array(draw(st.lists(st.integers(0, 99), max_size=5)), dtype=np.int32),
        tokens=tokens,
        text=draw(st.text(max_size=5)),
        log_mu=draw(floats(len(tokens))),
        log_ref=draw(floats(len(tokens))),
        score=Score(draw(st.sampled_from(Outcome)), draw(st.floats()), draw(st.text(max_size=5))),
        finish_reason=draw(st.sampled_from(FinishReason)),
        policy_version=draw(st.integers(0, 2**31 - 1)),
        reference_version=draw(st.integers(0, 2**31 - 1)),
        ticket=draw(st.integers(0, 2**40)),
        searcher=draw(st.integers(0, 99)),
        temperature=draw(st.floats(0.1, 2)),
    )


def assert_same(a, b):
    assert a.score.outcome is b.score.outcome
    assert a.finish_reason is b.finish_reason
    np.testing.assert_equal(a.score.reward, b.score.reward)
    assert a.score.detail == b.score.detail
    for name in Trajectory.__dataclass_fields__:
        if name != "score":
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            assert getattr(getattr(a, name), "dtype", 0) == getattr(getattr(b, name), "dtype", 0)


def assert_holds(log, *batches):
    """Compare bytes, since the reward of an excluded trajectory is NaN."""
    assert [to_bytes(batch) for batch in log.read()] == [to_bytes(batch) for batch in batches]


@given(st.lists(trajectories(), max_size=5), st.integers(0, 4))
def test_encoding_and_the_wire_keep_every_field(originals, skip):
    batch = from_bytes(to_bytes(encode(originals).slice(skip)))
    assert batch.schema == SCHEMA
    received = decode(batch)
    assert len(received) == len(originals[skip:])
    for a, b in zip(originals[skip:], received, strict=True):
        assert_same(a, b)


def test_what_crosses_the_wire_is_what_the_log_holds(tmp_path):
    with RolloutLog(tmp_path / "wire") as wire, RolloutLog(tmp_path / "log") as log:
        wire.append_all(MESSAGES)
        for batch in BATCHES:
            log.append(batch)
        assert wire.path.read_bytes() == log.path.read_bytes()


def test_repeated_prompts_cost_little_on_the_wire():
    prompt = np.arange(500, dtype=np.int32)
    size = [
        len(to_bytes(encode([trajectory(tokens=(i, 2), prompt_ids=prompt) for i in range(count)])))
        for count in (1, 24)
    ]
    assert size[1] < size[0] + 24 * 150  # 24 prompts uncompressed: 48,000 bytes


def test_the_log_is_one_arrow_stream_after_reopening(tmp_path):
    path = tmp_path / "rollouts.arrows"
    with RolloutLog(path) as log:
        first = log.append(BATCHES[0])
        assert first == log.position == path.stat().st_size
    with RolloutLog(path) as log:
        assert (log.position, log.dropped_bytes) == (first, 0)
        assert log.append_all(MESSAGES[1:]) == path.stat().st_size
        assert_holds(log, *BATCHES)
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table.num_rows == 12
    assert table["outcome"].to_pylist() == 3 * ["ok", "ok", "ok", "timeout"]


def test_a_torn_or_zeroed_tail_is_dropped_at_every_offset(tmp_path, monkeypatch):
    path = tmp_path / "rollouts.arrows"
    with RolloutLog(path) as log:
        intact = log.append_all(MESSAGES[:2])
        end = log.append(BATCHES[2])
    content = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda file: None)  # two thousand openings
    for cut in range(intact, end):
        for tail in (b"", bytes(end - cut)):
            if content[cut:].strip(b"\0") == b"" and tail:
                continue  # zeros over zeros: nothing is torn
            path.write_bytes(content[:cut] + tail)
            with RolloutLog(path) as log:
                assert log.position == intact, cut
                assert log.dropped_bytes == cut + len(tail) - intact
            assert path.stat().st_size == intact


def test_a_lost_page_in_the_middle_of_the_last_batch_is_noticed(tmp_path):
    path = tmp_path / "rollouts.arrows"
    with RolloutLog(path) as log:
        intact = log.append_all(MESSAGES[:2])
        end = log.append(BATCHES[2])
    content = path.read_bytes()
    body = pa.ipc.read_message(pa.BufferReader(content[intact:])).body
    for byte in range(end - body.size, end, 7):
        damaged = bytearray(content)
        damaged[byte] ^= 0xFF
        path.write_bytes(damaged)
        with RolloutLog(path) as log:
            assert log.position == intact, byte


def test_appending_goes_on_after_a_torn_tail(tmp_path):
    path = tmp_path / "rollouts.arrows"
    with RolloutLog(path) as log:
        log.append_all(MESSAGES[:2])
    os.truncate(path, path.stat().st_size - 10)
    with RolloutLog(path) as log:
        assert log.dropped_bytes > 0
        log.append(BATCHES[2])
        assert_holds(log, BATCHES[0], BATCHES[2])


def test_a_log_torn_while_it_was_created_starts_again(tmp_path):
    path = tmp_path / "rollouts.arrows"
    header = SCHEMA.serialize().to_pybytes()
    for content in (b"", header[:1], header[:-9], bytes(len(header)), header):
        path.write_bytes(content)
        with RolloutLog(path) as log:
            assert (log.position, log.dropped_bytes) == (len(header), 0)
            assert list(log.read()) == []


def test_another_file_is_refused_and_left_alone(tmp_path):
    other = pa.schema([("x", pa.int32())]).serialize().to_pybytes()
    for content in (b"step,loss\n1,0.5\n" * 200, other, bytes(range(200))):
        path = tmp_path / "rollouts.arrows"
        path.write_bytes(content)
        with pytest.raises(RunFolderError, match="is not a rollout log"):
            RolloutLog(path)
        assert path.read_bytes() == content


def test_truncating_goes_back_to_an_earlier_position(tmp_path):
    with RolloutLog(tmp_path / "rollouts.arrows") as log:
        checkpoint = log.append(BATCHES[0])
        log.append(BATCHES[1])
        log.truncate(checkpoint)
        assert log.position == log.path.stat().st_size == checkpoint
        log.append(BATCHES[2])
        assert_holds(log, BATCHES[0], BATCHES[2])
        with pytest.raises(StorageError, match="cannot be cut back"):
            log.truncate(log.position + 1)


@pytest.mark.parametrize("room", [0, 1, 500])
def test_a_full_disk_is_one_sentence_and_leaves_the_log_valid(tmp_path, monkeypatch, room):
    write = os.pwrite
    left = room

    def quota(file, content, offset):
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, content[:left], offset)
        left -= written
        return written

    with RolloutLog(tmp_path / "rollouts.arrows") as log:
        before = log.append(BATCHES[0])
        monkeypatch.setattr(os, "pwrite", quota)
        with pytest.raises(StorageError, match="No space left on device") as caught:
            log.append(BATCHES[1])
        assert str(caught.value).count("\n") == 0
        assert log.position == log.path.stat().st_size == before
        monkeypatch.undo()
        log.append(BATCHES[2])
        assert_holds(log, BATCHES[0], BATCHES[2])


def test_a_failed_sync_takes_the_batch_back(tmp_path, monkeypatch):
    def refuse(file):
        raise OSError(errno.EIO, "Input/output error")

    with RolloutLog(tmp_path / "rollouts.arrows") as log:
        before = log.append(BATCHES[0])
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError, match="Input/output error"):
            log.append(BATCHES[1])
        assert log.path.stat().st_size == before


def test_append_returns_after_the_bytes_are_synced(tmp_path, monkeypatch):
    calls = []
    write, sync = os.pwrite, os.fsync
    monkeypatch.setattr(os, "pwrite", lambda *a: (calls.append("write"), write(*a))[1])
    monkeypatch.setattr(os, "fsync", lambda *a: (calls.append("sync"), sync(*a))[1])
    with RolloutLog(tmp_path / "rollouts.arrows") as log:
        calls.clear()
        log.append_all(MESSAGES)
        assert calls == ["write", "sync"]


def test_a_log_being_written_is_read_up_to_a_position_and_left_as_it_is(tmp_path):
    path = tmp_path / "log"
    with RolloutLog(path) as log:
        ends = [log.append(batch) for batch in BATCHES]
        for count, end in enumerate(ends, start=1):
            for until in (end, end + 1) if count < 3 else (end, end + 10_000):
                found = [to_bytes(batch) for batch in read_log(path, until)]
                assert found == [to_bytes(batch) for batch in BATCHES[:count]]
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])  # as while the last batch is on its way
    assert len(list(read_log(path, ends[-1]))) == 2
    assert path.read_bytes() == whole[:-5]


def test_reading_what_is_no_log_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="does not exist, so the run has no rollouts yet"):
        list(read_log(tmp_path / "log", 0))
    (tmp_path / "log").write_bytes(b"something else, long enough to be read")
    with pytest.raises(RunFolderError, match="not a rollout log"):
        list(read_log(tmp_path / "log", 0))
