"""Runs of adapters: resumed, anchored, evaluated, analysed, planned."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

import tba
from tba.analyse import Plan, analyse
from tba.eval import evaluate_models, find_models
from tba.plan import contention, timing
from tba.plan.measure import measure
from tba.policy.adapters import load_trainable, trained_parameters
from tba.run.checkpoint import load_newest
from tba.run.folder import RunFolder
from tba.run.summary import Ending
from tba.update import PolicyUpdate
from tiny_runs import final_tensors, metrics, rollouts, tiny_config, train

LORA = {"lora": {"rank": 2}}
ANCHORED = {"kind": "decoupled_ppo"}
CPU = torch.device("cpu")


class Killed(BaseException):
    """Ends a run as SIGKILL does: nothing catches it, nothing is put in order."""


def config_of(folder: Path, **sections):
    folder.mkdir(exist_ok=True)
    model = {**LORA, **sections.pop("model", {})}
    return tiny_config(folder, model=model, **{"checkpoint": {"every": 2, "keep": 9}, **sections})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return a finished run whose objective has an anchor."""
    folder = tmp_path_factory.mktemp("lora")
    train(folder, config_of(folder, objective=ANCHORED))
    return folder / "run"


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(run, tmp_path, monkeypatch):
    step = PolicyUpdate.step

    def killed(update, batch, number):
        if number == 5:
            raise Killed
        return step(update, batch, number)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyUpdate, "step", killed)
        with pytest.raises(Killed):
            train(tmp_path, config_of(tmp_path, objective=ANCHORED))
    assert load_newest(tmp_path / "run/checkpoints").state.step == 4
    assert tba.resume(tmp_path / "run", progress=False).ended == Ending.FINISHED
    first, second = final_tensors(run), final_tensors(tmp_path / "run")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    for file in ("adapter/adapter_model.safetensors", "anchor.safetensors"):
        one, other = (
            safetensors.torch.load_file(load_newest(r / "checkpoints").path / file)
            for r in (run, tmp_path / "run")
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert repr(rollouts(run)) == repr(rollouts(tmp_path / "run"))


def test_a_checkpoint_has_the_adapter_of_its_own_step_and_an_anchor_of_the_adapter_alone(run):
    folder = RunFolder.open(run)
    config = folder.config()
    checkpoint = load_newest(folder.checkpoints)
    policy = load_trainable(str(folder.model), config, device=CPU, checkpoint=checkpoint.path)
    adapter = trained_parameters(policy.model)
    anchor = safetensors.torch.load_file(checkpoint.path / "anchor.safetensors")
    assert anchor.keys() == adapter.keys()
    settings = json.loads((checkpoint.path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2, 32.0)
    merged = AutoModelForCausalLM.from_pretrained(checkpoint.policy, dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5, 6]])
    policy.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(merged(ids).logits, policy.model(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_run_is_evaluated_and_analysed_as_any_other(run):
    models = find_models(str(run), None)
    report = evaluate_models(RunFolder.open(run).config(), models, samples=4, ks=[1])
    assert abs(report.kl) > 1e-3
    found = analyse(run, Plan(objectives=("tb", "decoupled_ppo"), samples=2))
    assert found.bins
    assert all(report.grad_norm["decoupled_ppo"] > 0 for report in found.bins)


def test_training_goes_on_with_recomputed_activations_in_bfloat16_and_eight_bits(tmp_path):
    config = config_of(
        tmp_path,
        model={"gradient_checkpointing": True, "lora": {"rank": 2, "target_modules": ["q_proj"]}},
        trainer={"precision": "bfloat16"},
        search={"precision": "int8"},
    )
    summary = train(tmp_path, config)
    assert (summary.ended, summary.steps) == (Ending.FINISHED, 6)
    assert all(line["skipped"] == 0 and line["grad_norm"] > 0 for line in metrics(tmp_path / "run"))
    saved = load_newest(tmp_path / "run/checkpoints").path / "adapter/adapter_model.safetensors"
    tensors = safetensors.torch.load_file(saved)
    assert len(tensors) == 2
    assert all("q_proj" in name and tensor.any() for name, tensor in tensors.items())


@pytest.mark.slow
def test_a_plan_counts_the_adapter_as_what_travels(tmp_path, monkeypatch):
    for module in (timing, contention):
        monkeypatch.setattr(module, "WINDOW_S", 0.05)
    config = config_of(tmp_path, runtime={"kind": "local"})
    profile = measure(config, lambda text: None)
    # 16 wide, 32 between: q, k, v, o of (16 + 16) and gate, up, down of (16 + 32), times rank 2
    assert profile.weight_bytes == 4 * 2 * (4 * 32 + 3 * 48)
