"""The weights' wire: what arrives is what was sent, or it is noticed."""

import threading

import pytest
import torch
import torch.multiprocessing
from xxhash import xxh3_128

from tba.errors import WaitTimeoutError
from tba.sync import NOTHING_PUBLISHED, WeightStore, digest_of


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator),
        "scalar": torch.randn((), generator=generator),
    }


def zeros_like(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(w, dtype=dtype) for name, w in weights.items()}


def test_digest_is_xxh3_128_of_version_then_bytes_in_order() -> None:
    weights = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([3], dtype=torch.int64)}
    by_hand = (
        (7).to_bytes(8, "little")
        + bytes.fromhex("0000803f00000040")  # 1.0 and 2.0 in little-endian float32
        + (3).to_bytes(8, "little")
    )
    assert digest_of(weights, 7) == xxh3_128(by_hand).digest()
    assert digest_of(weights, 8) != digest_of(weights, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pulled_weights_equal_published_ones_in_the_travel_dtype(dtype: torch.dtype) -> None:
    weights = make_weights(0)
    store = WeightStore(weights, dtype)
    into = zeros_like(weights, dtype)
    assert store.pull(into, newer_than=NOTHING_PUBLISHED) is None
    store.publish(weights, 4)
    store.flush()
    assert store.pull(into, newer_than=NOTHING_PUBLISHED) == 4
    for name, weight in weights.items():
        assert torch.equal(into[name], weight.to(dtype))
    assert store.pull(into, newer_than=4) is None


def test_publishing_copies_so_later_changes_of_the_trainer_do_not_travel() -> None:
    weights = make_weights(0)
    store = WeightStore(weights, torch.float32)
    before = {name: weight.clone() for name, weight in weights.items()}
    store.publish(weights, 0)
    for weight in weights.values():
        weight.add_(1.0)
    store.flush()
    into = zeros_like(weights, torch.float32)
    store.pull(into, newer_than=-1)
    assert all(torch.equal(into[name], before[name]) for name in weights)


def test_header_shows_the_old_version_until_the_new_one_is_hashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, gate = make_weights(0), threading.Event()
    store = WeightStore(weights, torch.float32)
    store.publish(weights, 1)
    store.flush()
    real = digest_of
    monkeypatch.setattr("tba.sync.digest_of", lambda w, v: (gate.wait(10), real(w, v))[1])
    store.publish(make_weights(1), 2)
    assert store.version == 1
    gate.set()
    store.flush()
    assert store.version == 2


def test_damaged_memory_is_noticed_named_and_never_tagged(caplog: pytest.LogCaptureFixture) -> None:
    weights = make_weights(0)
    store = WeightStore(weights, torch.float32)
    store.publish(weights, 3)
    store.flush()
    store._slots[0, 2] ^= 1  # one bit
    with pytest.raises(WaitTimeoutError, match="did not match their hash"):
        store.pull(zeros_like(weights, torch.float32), newer_than=-1)
    assert "weights of version 3 do not match their hash" in caplog.text


def test_weights_overwritten_while_being_copied_are_taken_again() -> None:
    """The store is overwritten twice in the middle of the first copy, as by a fast trainer."""
    weights = make_weights(0)
    store = WeightStore(weights, torch.float32)
    store.publish(weights, 1)
    store.flush()

    class Interrupting(dict[str, torch.Tensor]):
        calls = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                for version in (2, 3):
                    store.publish(make_weights(version), version)
                    store.flush()
            return super().__getitem__(name)

    into = Interrupting(zeros_like(weights, torch.float32))
    assert store.pull(into, newer_than=-1) == 3
    assert all(torch.equal(into[name], w) for name, w in make_weights(3).items())


def _pull_in_child(store: WeightStore, pipe: object) -> None:
    into = zeros_like(make_weights(0), torch.float32)
    version = store.pull(into, newer_than=-1)
    pipe.send((version, {name: w.numpy().tolist() for name, w in into.items()}))  # type: ignore[attr-defined]


def test_another_process_holds_the_same_weights() -> None:
    weights = make_weights(5)
    store = WeightStore(weights, torch.float32)
    store.publish(weights, 9)
    store.flush()
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_pull_in_child, args=(store, theirs))
    child.start()
    assert ours.poll(60)
    version, received = ours.recv()
    child.join(30)
    assert version == 9
    assert received == {name: w.numpy().tolist() for name, w in weights.items()}
