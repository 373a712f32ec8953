import math

import numpy as np
import pytest
import torch

from tba.config import BuildConfig, Config, ModelConfig
from tba.config.load import load_config
from tba.engines import Sampling
from tba.engines.torch_engine import TorchEngine
from tba.errors import DivergedError
from tba.policy import build_policy, load_policy
from tba.records import FinishReason, Query
from tba.warm_start import warm_start

TEXTS = {"1=": "2", "23=": "45", "678=": "901"}


@pytest.fixture
def policy(tmp_path):
    config = BuildConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    build_policy(config, tmp_path, seed=0)
    return load_policy(tmp_path, ModelConfig(), device=torch.device("cpu"), dtype=torch.float32)


def _rows(policy):
    tokenize = policy.tokenizer
    return [(np.array(tokenize(p)["input_ids"], dtype=np.int32), text) for p, text in TEXTS.items()]


def _config(*, seed: int = 0, micro_batch_tokens: int = 16_384, **changes: object) -> Config:
    own = {"steps": 60, "batch_size": 2, "learning_rate": 1e-2, "stop_at_loss": 0.0}
    section = {**own, **changes}
    config = load_config(["arithmetic"], ["--search.temperature=0.5", f"--seed={seed}"])
    return config.model_copy(
        update={
            "warm_start": config.warm_start.model_copy(update=section),
            "trainer": config.trainer.model_copy(update={"micro_batch_tokens": micro_batch_tokens}),
        }
    )


def test_the_policy_learns_the_demonstrations_and_when_to_stop(policy):
    loss = warm_start(policy, _rows(policy), _config())
    assert loss < 0.05
    queries = [Query(0, "", ids) for ids, _ in _rows(policy)]
    engine = TorchEngine(policy.model, policy.eos_ids)
    found = engine.generate(queries, Sampling(1, 0.0, 8), torch.Generator())
    for (response,), text in zip(found, TEXTS.values(), strict=True):
        assert response.finish_reason is FinishReason.STOP
        assert policy.tokenizer.decode(response.tokens, skip_special_tokens=True) == text


def test_the_loss_is_the_mean_cross_entropy_of_answers_and_end_of_sequence(policy):
    rows = _rows(policy)
    total, count = 0.0, 0
    for prompt, text in rows:
        answer = [*policy.tokenizer(text)["input_ids"], policy.eos_ids[0]]
        ids = torch.tensor([[*prompt.tolist(), *answer]])
        with torch.no_grad():
            log_probs = policy.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total -= sum(log_probs[at, token].item() for at, token in enumerate(answer))
        count += len(answer)
    loss = warm_start(policy, rows, _config(steps=1, batch_size=3))
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_the_result_depends_on_the_seed_alone(policy):
    initial = {name: value.clone() for name, value in policy.model.state_dict().items()}
    losses = []
    for seed in (0, 0, 1):
        policy.model.load_state_dict(initial)
        torch.rand(1)
        losses.append(warm_start(policy, _rows(policy), _config(steps=5, seed=seed)))
    assert losses[0] == losses[1] != losses[2]


def test_no_steps_leave_the_policy_as_it_is(policy):
    before = policy.model.lm_head.weight.clone()
    assert math.isnan(warm_start(policy, _rows(policy), _config(steps=0)))
    assert torch.equal(policy.model.lm_head.weight, before)


def test_micro_batches_change_neither_loss_nor_policy(policy):
    initial = {name: value.clone() for name, value in policy.model.state_dict().items()}
    found = []
    for tokens in (16_384, 1):  # one micro-batch of all three rows, and one each
        policy.model.load_state_dict(initial)
        config = _config(steps=3, batch_size=3, micro_batch_tokens=tokens)
        loss = warm_start(policy, _rows(policy), config)
        found.append((loss, policy.model.lm_head.weight.detach().clone()))
    (whole, weight), (cut, same) = found
    assert cut == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(same, weight, rtol=0, atol=1e-5)


def test_fine_tuning_without_a_finite_loss_is_no_result(policy):
    with torch.no_grad():
        next(policy.model.parameters()).fill_(math.nan)
    with pytest.raises(DivergedError, match=r"cross-entropy is nan after 3 steps: lower the"):
        warm_start(policy, _rows(policy), _config(steps=3))
