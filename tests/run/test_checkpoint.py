import logging
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.errors import RunFolderError, StorageError
from tba.policy.loading import Policy
from tba.records import EvalReport
from tba.run.checkpoint import (
    TrainerState,
    load_newest,
    load_step,
    remove_superseded,
    save_checkpoint,
)
from tba.run.summary import StalenessTotals, Totals

BUFFER = {
    "tokens": np.arange(7, dtype=np.int32),
    "reward": np.array([[0.5, -1.0], [np.nan, 2.0]], dtype=np.float32).T,  # not contiguous
    "live": np.array([True, False]),
    "texts": np.frombuffer("1é2".encode(), dtype=np.uint8),  # not writable
    "nothing": np.zeros((0, 3), dtype=np.int64),
    "count": np.array(3, dtype=np.int64),
}


def state(step=100, **changes) -> TrainerState:
    values = {
        "step": step,
        "reference_version": 0,
        "rollout_position": 321,
        "resumptions": ((40, 6), (90, 14)),
        "searched_pass_at_1": 0.25,
        "before": EvalReport(0, 10, 1 / 3, 0.4, 4.5, 0, 0.1 + 0.2),
        "totals": Totals(seconds=0.7, kept=5, staleness=StalenessTotals(2, 5, 1, 4)),
    }
    return TrainerState(**values | changes)


def adamw(model):
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    vectors = [(name, p) for name, p in model.named_parameters() if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
    )


def train(model, optimizer, steps, *, seed):
    """Take some steps; return their losses."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        tokens = torch.randint(16, (4, 12), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 3)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_weights(one, other):
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    for (name, a), (other_name, b) in pairs:
        assert name == other_name
        assert a.dtype == b.dtype == torch.float32
        assert torch.equal(a, b), name


@pytest.fixture
def save(tmp_path, make_model, tokenizer):
    """Save a checkpoint of a small untrained policy."""
    model = make_model()
    optimizer = adamw(model)

    def save(step=100, keep=2, **changes):
        arguments = {"policy": Policy(model, tokenizer, ()), "optimizer": optimizer}
        changes = {"buffer": BUFFER} | changes
        path = save_checkpoint(tmp_path, state(step), **arguments | changes)
        remove_superseded(tmp_path, keep=keep, until=step)
        return path

    return save


@pytest.mark.parametrize("tied", [False, True])
def test_a_restored_trainer_goes_on_bit_for_bit(tmp_path, make_model, tokenizer, tied):
    model = make_model(tie_word_embeddings=tied)
    optimizer = adamw(model)
    train(model, optimizer, 3, seed=1)
    save_checkpoint(
        tmp_path, state(), policy=Policy(model, tokenizer, ()), optimizer=optimizer, buffer={}
    )

    checkpoint = load_newest(tmp_path)
    restored = AutoModelForCausalLM.from_pretrained(checkpoint.policy, dtype=torch.float32)
    assert_same_weights(restored, model)
    restored.train()
    restored_optimizer = adamw(restored)
    checkpoint.restore_optimizer(restored_optimizer)

    assert train(restored, restored_optimizer, 3, seed=2) == train(model, optimizer, 3, seed=2)
    assert_same_weights(restored, model)


def test_the_optimizer_comes_back_exactly(tmp_path, make_model, tokenizer):
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 2, seed=0)
    save_checkpoint(
        tmp_path, state(), policy=Policy(model, tokenizer, ()), optimizer=optimizer, buffer={}
    )
    other = make_model(seed=9)
    restored = adamw(other)
    load_newest(tmp_path).restore_optimizer(restored)
    ours, theirs = optimizer.state_dict(), restored.state_dict()
    assert theirs["param_groups"] == ours["param_groups"]
    assert theirs["state"].keys() == ours["state"].keys()
    for index, slots in ours["state"].items():
        assert set(slots) == {"step", "exp_avg", "exp_avg_sq"}
        for slot, tensor in slots.items():
            assert torch.equal(theirs["state"][index][slot], tensor)
            assert theirs["state"][index][slot].dtype == tensor.dtype


def test_the_checkpoint_of_one_step_is_found_or_missed_by_name(tmp_path, save):
    for step in (3, 6):
        save(step, keep=9)
    assert load_step(tmp_path, 3).state == state(3)
    with pytest.raises(RunFolderError, match="no checkpoint of step 4: it has those of 3, 6"):
        load_step(tmp_path, 4)
    (load_step(tmp_path, 6).path / "buffer.safetensors").write_bytes(b"")
    with pytest.raises(RunFolderError, match=r"is damaged: buffer\.safetensors has 0 bytes"):
        load_step(tmp_path, 6)
    with pytest.raises(RunFolderError, match="it has those of no step"):
        load_step(tmp_path / "nowhere", 1)


def test_an_optimizer_that_has_not_stepped_can_be_saved(tmp_path, save, make_model):
    save()
    model = make_model()
    optimizer = adamw(model)
    load_newest(tmp_path).restore_optimizer(optimizer)
    assert optimizer.state_dict()["state"] == {}


def test_an_optimizer_of_other_parameters_is_refused(tmp_path, save, make_model):
    save()
    model = make_model()
    optimizer = torch.optim.AdamW(list(model.named_parameters())[1:])
    with pytest.raises(RunFolderError, match="optimiser of other parameters"):
        load_newest(tmp_path).restore_optimizer(optimizer)


def test_state_and_buffer_come_back_exactly(tmp_path, save):
    save()
    checkpoint = load_newest(tmp_path)
    assert checkpoint.state == state()
    arrays = checkpoint.buffer()
    assert arrays.keys() == BUFFER.keys()
    for name, array in BUFFER.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array, strict=True)


def test_the_policy_folder_is_an_ordinary_one(save, tokenizer):
    policy = save() / "policy"
    loaded = AutoTokenizer.from_pretrained(policy)
    assert loaded("12+").input_ids == tokenizer("12+").input_ids
    assert loaded.eos_token_id == 1
    assert {"config.json", "model.safetensors"} <= {p.name for p in policy.iterdir()}


def test_nothing_in_it_is_pickled(save):
    kinds = {p.suffix for p in save().rglob("*") if p.is_file()}
    assert kinds == {".json", ".safetensors"}


def test_a_reset_reference_comes_back_and_is_a_model_folder(tmp_path, save, make_model):
    save(100)
    assert load_newest(tmp_path).reference() is None
    reference = make_model(seed=3)
    path = save(200, reference=dict(reference.named_parameters()))
    weights = load_newest(tmp_path).reference()
    for name, parameter in reference.named_parameters():
        assert torch.equal(weights[name], parameter)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(path / "reference"), reference)


def test_only_the_newest_are_kept_and_one_that_is_read(tmp_path, save):
    for step in (1, 2, 3, 4):
        save(step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    read = tmp_path / "step-00000003"
    remove_superseded(tmp_path, keep=1, until=4, in_use=read)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    remove_superseded(tmp_path, keep=1, until=4)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_no_checkpoint_is_no_error(tmp_path):
    assert load_newest(tmp_path) is None
    assert load_newest(tmp_path / "none") is None


FILES = [
    "MANIFEST.json",
    "state.json",
    "buffer.safetensors",
    "optimizer.safetensors",
    "optimizer.json",
    "policy/model.safetensors",
    "policy/tokenizer.json",
]


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def alter(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [os.unlink, truncate, alter])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, save, caplog, name, damage):
    save(100)
    damage(save(200) / name)
    with caplog.at_level(logging.WARNING, logger="tba"):
        assert load_newest(tmp_path).state.step == 100
    (message,) = caplog.messages
    assert "step-00000200 is damaged" in message
    if (name, damage) != ("MANIFEST.json", alter):  # which then speaks ill of another file
        assert name in message


def test_no_whole_checkpoint_is_an_error_and_not_a_new_beginning(tmp_path, save):
    truncate(save() / "state.json")
    with pytest.raises(RunFolderError, match="none of the 1 checkpoints"):
        load_newest(tmp_path)


def test_a_damaged_later_one_never_outlives_its_repair(tmp_path, save):
    save(100)
    truncate(save(300) / "state.json")
    assert load_newest(tmp_path).state.step == 100
    save(200, keep=1)  # the run went on from 100
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000200"]


def test_one_of_the_same_step_is_replaced(tmp_path, save):
    save(100)
    save(100, buffer={"tokens": np.array([9])})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000100"]
    assert load_newest(tmp_path).buffer()["tokens"].tolist() == [9]


def test_a_crash_while_one_is_replaced_loses_neither_it_nor_its_readers(tmp_path, save):
    path = save(100)
    path.rename(path.with_suffix(".replaced"))  # killed between the two renames
    assert load_newest(tmp_path).state.step == 100
    save(100, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000100"]


def test_what_a_killed_save_left_is_neither_seen_nor_kept(tmp_path, save):
    shutil.copytree(save(100), tmp_path / "tmp-step-00000200")
    assert load_newest(tmp_path).state.step == 100
    save(300)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000100", "step-00000300"]


@contextmanager
def largest_file(size):
    """Let the system refuse whatever would make a file larger than this."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("size", [0, 100, 20_000])  # config.json, tokenizer or weights refused
def test_a_refused_write_leaves_the_older_checkpoint_alone(tmp_path, save, size):
    save(100)
    with largest_file(size), pytest.raises(StorageError, match="could not be written") as info:
        save(200)
    assert "\n" not in str(info.value)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000100"]
    assert load_newest(tmp_path).state.step == 100


def test_a_tokenizer_that_does_not_fit_is_a_storage_error_too(tmp_path, save, tokenizer):
    tokenizer.add_tokens([f"<word-{i}>" for i in range(2_000)])
    save(100)
    with largest_file(120_000), pytest.raises(StorageError, match="tokenizer in"):
        save(200)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000100"]


def test_an_error_of_our_own_leaves_nothing_behind(tmp_path, save):
    with pytest.raises(AttributeError):
        save(100, policy=None)
    assert list(tmp_path.iterdir()) == []


CRASHES = """
import os, shutil, sys
from pathlib import Path
import numpy as np, torch
from transformers import LlamaConfig, LlamaForCausalLM
from tba.policy.loading import Policy
from tba.run.checkpoint import TrainerState, load_newest, remove_superseded, save_checkpoint
from tba.run.summary import Totals

class Tokenizer:
    def save_pretrained(self, folder): pass

root = Path(sys.argv[1])
model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8,
    num_hidden_layers=1, num_attention_heads=1))
optimizer = torch.optim.AdamW(model.named_parameters())

def save(folder, step):
    state = TrainerState(step, 0, 0, (), float("nan"), None, Totals())
    save_checkpoint(folder, state, policy=Policy(model, Tokenizer(), ()), optimizer=optimizer,
        buffer={"step": np.array([step])})
    remove_superseded(folder, keep=1, until=step)

def save_until(event, folder):
    seen = 0
    def watch(name, arguments):
        nonlocal seen
        if name.startswith(("open", "os.", "shutil.")) and str(folder) in repr(arguments):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), 9)
    sys.addaudithook(watch)
    save(folder, 2)
    save(folder, 2)

save(root / "first", 1)
for event in range(1, 10_000):
    folder = root / str(event)
    shutil.copytree(root / "first", folder)
    child = os.fork()
    if child == 0:
        save_until(event, folder)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = load_newest(folder)
    assert found.buffer()["step"] == [found.state.step], (event, found)
    save(folder, 3)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"], event
    if status == 0:
        break
    shutil.rmtree(folder)
print(event)
"""


def test_killed_at_any_point_there_is_a_whole_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CRASHES, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50  # so many points were tried
