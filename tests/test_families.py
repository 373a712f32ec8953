"""Ten asynchronous steps of each family of models, all weights or adapters alone."""

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tba.session
from families import FAMILIES, family_config
from tba.engines.merging import MergingEngine
from tba.policy.adapters import load_trainable, trained_parameters
from tba.policy.loading import load_policy
from tba.policy.log_probs import response_log_probs
from tba.run.summary import Ending
from tba.sync import WeightStore
from tiny_runs import train

CPU = torch.device("cpu")
LORA = {"lora": {"rank": 2, "alpha": 8.0}}


def all_slow_but(one):
    """Return the families, all but one marked as slow, since a run starts processes."""
    return [pytest.param(f, marks=() if f == one else pytest.mark.slow) for f in FAMILIES]


@pytest.fixture
def trained(monkeypatch):
    """Note the policies and stores that a run makes in the trainer's process."""
    policies, stores = [], []

    def load(*arguments, **options):
        policies.append(load_trainable(*arguments, **options))
        return policies[-1]

    def store(*arguments):
        stores.append(WeightStore(*arguments))
        return stores[-1]

    monkeypatch.setattr(tba.session, "load_trainable", load)
    monkeypatch.setattr(tba.session, "WeightStore", store)
    return policies, stores


def rows(tokenizer):
    prompts = tokenizer(["1+9=", "73+5="])["input_ids"]
    answers = tokenizer(["10a", "4"])["input_ids"]
    as_array = lambda ids: torch.tensor(ids, dtype=torch.int32).numpy()  # noqa: E731
    return [as_array(ids) for ids in prompts], [as_array(ids) for ids in answers]


@torch.no_grad()
def logits(model, tokenizer):
    batch = tokenizer(["1+9=10", "73+5=4"], return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    return model.eval()(**batch).logits[batch["attention_mask"].bool()]


def newest(run):
    return max((run / "checkpoints").glob("step-????????"))


@pytest.mark.parametrize("family", all_slow_but("smollm2"))
def test_ten_asynchronous_steps_end_in_a_folder_that_plain_transformers_reads(
    family, tmp_path, trained
):
    config = family_config(family, tmp_path)
    summary = train(tmp_path, config)
    assert (summary.ended, summary.steps) == (Ending.FINISHED, 10)
    policy = trained[0][0]
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "initial", dtype=torch.float32)
    moved = dict(policy.model.named_parameters())
    assert any(not torch.equal(weight, moved[name]) for name, weight in start.named_parameters())
    folder = newest(tmp_path / "run") / "policy"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    assert type(plain) is type(policy.model)
    assert all(torch.equal(weight, moved[name]) for name, weight in plain.named_parameters())
    policy.model.set_attn_implementation(plain.config._attn_implementation)
    assert torch.equal(logits(plain, tokenizer), logits(policy.model, tokenizer))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("family", all_slow_but("gpt2"))
def test_ten_asynchronous_steps_of_adapters_change_and_publish_these_alone(
    family, tmp_path, trained
):
    config = family_config(family, tmp_path, model=LORA)
    summary = train(tmp_path, config)
    assert (summary.ended, summary.steps) == (Ending.FINISHED, 10)
    (policy,), (store,) = trained
    model, device = policy.model, policy.model.device
    base = load_policy(tmp_path / "initial", config.model, device=CPU, dtype=torch.float32)

    weights = {n.replace(".base_layer.", "."): w for n, w in model.named_parameters()}
    frozen = dict(base.model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in frozen.items())
    assert not any(weights[name].requires_grad for name in frozen)

    adapter = trained_parameters(model)
    assert list(store.room(device)) == list(adapter)
    assert weights.keys() - frozen.keys() == adapter.keys()
    assert all(".lora_A." in name or ".lora_B." in name for name in adapter)
    sent = sum(weight.numel() for weight in adapter.values()) * 4
    assert sent <= store._layout.nbytes <= sent + 64 * len(adapter)

    engine_model = load_policy(tmp_path / "initial", config.model, device=CPU, dtype=torch.float32)
    engine = MergingEngine(
        engine_model.model,
        policy.eos_ids,
        base=base.model,
        adapter=store.room(device),
        scale=4.0,
    )
    assert store.pull(engine.weights(), newer_than=-1) == 10
    engine.refresh()
    prompts, answers = rows(policy.tokenizer)
    found, wanted, untrained = (
        response_log_probs(m, prompts, answers, np.arange(len(answers)), temperature=1.0)[0]
        for m in (engine_model.model, model, base.model)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert (wanted - untrained).abs().max() > 1e-3

    saved = newest(tmp_path / "run")
    merged = AutoModelForCausalLM.from_pretrained(saved / "policy", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "initial", dtype=torch.float32)
    apart = peft.PeftModel.from_pretrained(plain, saved / "adapter")
    given = logits(merged, policy.tokenizer), logits(apart, policy.tokenizer)
    torch.testing.assert_close(*given, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given[0], logits(model, policy.tokenizer), rtol=1e-4, atol=1e-5)
    optimiser = safetensors.torch.load_file(saved / "optimizer.safetensors")
    assert {key.rpartition("/")[0] for key in optimiser} == adapter.keys()
