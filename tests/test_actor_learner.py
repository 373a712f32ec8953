"""A3C: searchers compute gradients with their own weights, the trainer applies them."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tba.actor_learner import batch_of
from tba.config.load import load_config
from tba.errors import ConfigError
from tba.policy.loading import load_policy
from tba.records import Outcome, Score
from tba.run.summary import Ending
from tba.sync import WeightStore
from tba.update import PolicyUpdate
from test_pace import trajectory
from tiny_runs import metrics, rollouts, tiny_config, train

STEPS = 8
BETA, DISCOUNT, VALUE = 0.2, 0.9, 0.5
OBJECTIVE = {
    "kind": "a3c",
    "beta": {"kind": "constant", "value": BETA},
    "discount": DISCOUNT,
    "value_coefficient": VALUE,
}
RUNTIMES = [
    {"kind": "inline"},
    pytest.param(
        {"kind": "local", "trainer_threads": 1, "searcher_threads": 1}, marks=pytest.mark.slow
    ),
]


class Recorder:
    """What was published by version, and each step's batch with the weights around it."""

    def __init__(self, monkeypatch):
        self.published, self.steps = {}, []
        publish, step = WeightStore.publish, PolicyUpdate.step

        def publish_and_note(store, weights, version):
            self.published[version] = copies(weights)
            publish(store, weights, version)

        def step_and_note(update, batch, number):
            before = copies(update.published())
            result = step(update, batch, number)
            self.steps.append((batch, before, copies(update.published()), result))
            return result

        monkeypatch.setattr(WeightStore, "publish", publish_and_note)
        monkeypatch.setattr(PolicyUpdate, "step", step_and_note)


def copies(weights):
    return {name: weight.detach().clone() for name, weight in weights.items()}


def gradient_by_hand(config, folder, weights, batch):
    """A3C's loss and gradient from the model's own forward pass, a response at a time."""
    model = load_policy(
        str(folder / "run" / "model"),
        config.model,
        device=torch.device("cpu"),
        dtype=torch.float32,
    ).model
    head, offset = (
        weights[f"heads._maps.value.{name}"].clone().requires_grad_() for name in ("weight", "bias")
    )
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])
    total = 0.0
    for row, tokens in enumerate(batch.tokens):
        prompt = batch.prompts[batch.query_of_row[row]]
        ids = torch.tensor(np.concatenate([prompt, tokens])[None].astype(np.int64))
        output = model(ids, output_hidden_states=True)
        predicting = slice(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        log_probs = output.logits[0, predicting].log_softmax(-1)
        log_pi = log_probs[torch.arange(len(tokens)), torch.tensor(tokens).long()]
        value = (output.hidden_states[-1][0, predicting] @ head.T + offset).squeeze(-1)
        rewards = -BETA * (log_pi.detach() - torch.from_numpy(batch.log_ref[row]))
        rewards[-1] += batch.reward[row]
        returns = [
            sum(DISCOUNT ** (u - t) * rewards[u] for u in range(t, len(tokens)))
            for t in range(len(tokens))
        ]
        error = torch.stack(returns) - value
        total = total + (-error.detach() * log_pi + VALUE / 2 * error.square()).sum()
    loss = total / len(batch.tokens)
    loss.backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    heads = {"heads._maps.value.weight": head.grad, "heads._maps.value.bias": offset.grad}
    return loss.item(), {**gradient, **heads}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_is_applied_is_the_gradient_at_the_weights_that_sampled(
    tmp_path, monkeypatch, runtime
):
    recorder = Recorder(monkeypatch)
    config = tiny_config(
        tmp_path,
        objective=OBJECTIVE,
        runtime=runtime,
        sync={"sync_every": 3},
        trainer={"steps": STEPS, "max_grad_norm": 1e9, "head_learning_rate": 3e-3},
    )
    summary = train(tmp_path, config)
    assert (summary.ended, summary.steps, summary.bad_steps) == (Ending.FINISHED, STEPS, 0)
    assert len(recorder.steps) == STEPS
    versions = []
    for step, (batch, _, _, result) in enumerate(recorder.steps):
        (version,) = set(batch.policy_version.tolist())
        versions.append(version)
        weights = recorder.published[version]
        loss, gradient = gradient_by_hand(config, tmp_path, weights, batch)
        assert result.metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert gradient.keys() == batch.gradient.of.keys()
        for name, expected in gradient.items():
            sent = torch.from_numpy(batch.gradient.of[name])
            torch.testing.assert_close(sent, expected, rtol=1e-4, atol=1e-6, msg=name)
        assert version <= step
    assert versions == sorted(versions)
    if runtime["kind"] == "inline":
        assert versions == [0, 0, 0, 3, 3, 3, 6, 6]
    lines = metrics(tmp_path / "run")
    assert [line["staleness_max"] for line in lines] == [s - v for s, v in enumerate(versions)]
    heads = recorder.published[6]["heads._maps.value.weight"]
    assert heads.abs().sum() > 0, "searchers are given the heads that were trained"


def test_a_gradient_that_was_sent_is_one_adam_step_on_the_present_weights(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    config = tiny_config(
        tmp_path,
        objective=OBJECTIVE,
        sync={"sync_every": 2},
        trainer={"steps": 4, "max_grad_norm": 0.1, "learning_rate_schedule": {"kind": "constant"}},
    )
    train(tmp_path, config)
    weights = copies(recorder.steps[0][1])
    policy = [weight for name, weight in weights.items() if not name.startswith("heads")]
    heads = [weight for name, weight in weights.items() if name.startswith("heads")]
    trainer = config.trainer
    adam = torch.optim.AdamW(
        [
            {"params": policy, "lr": trainer.learning_rate},
            {"params": heads, "lr": trainer.head_learning_rate},
        ],
        betas=(trainer.adam_beta1, trainer.adam_beta2),
        eps=trainer.adam_epsilon,
        weight_decay=trainer.weight_decay,
    )
    for step, (batch, _, after, _) in enumerate(recorder.steps):
        rate = min(1.0, (step + 1) / max(1, trainer.learning_rate_schedule.warmup_steps))
        for group, peak in zip(
            adam.param_groups, (trainer.learning_rate, trainer.head_learning_rate), strict=True
        ):
            group["lr"] = rate * peak
            sent = [
                torch.from_numpy(batch.gradient.of[name].copy())
                for name, weight in weights.items()
                if any(weight is one for one in group["params"])
            ]
            norm = torch.cat([gradient.ravel() for gradient in sent]).norm()
            for weight, gradient in zip(group["params"], sent, strict=True):
                weight.grad = gradient * min(1.0, 0.1 / float(norm + 1e-6))
        adam.step()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, after[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.slow
def test_a_slow_trainer_makes_searchers_wait_and_loses_no_gradient(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    step = PolicyUpdate.step

    def slow(update, batch, number):
        time.sleep(0.1)
        return step(update, batch, number)

    monkeypatch.setattr(PolicyUpdate, "step", slow)
    config = tiny_config(
        tmp_path,
        objective=OBJECTIVE,
        runtime={"kind": "local", "trainer_threads": 1, "searcher_threads": 1},
        trainer={"steps": 30},
        sync={"sync_every": 1},
    )
    summary = train(tmp_path, config)
    assert (summary.ended, summary.steps) == (Ending.FINISHED, 30)
    assert max(line["staleness_max"] for line in metrics(tmp_path / "run")) <= 10
    applied = [row.tobytes() for batch, *_ in recorder.steps for row in batch.tokens]
    logged = [
        np.array(row["tokens"], dtype=np.int32).tobytes() for row in rollouts(tmp_path / "run")
    ]
    assert applied == logged[: len(applied)], "each batch once, in the order it was found"


def test_a_batch_of_a_search_leaves_out_queries_with_a_failed_response():
    failed = Score(Outcome.ERROR, float("nan"), "boom")
    found = [trajectory(ticket, reward) for ticket, reward in enumerate((1.0, 2.0, 3.0, 4.0))]
    asked = [replace(t, query_id=at // 2) for at, t in enumerate(found)]
    whole = batch_of(asked)
    assert whole.index.tolist() == [[0, 1], [2, 3]]
    assert whole.reward[whole.index].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    part = batch_of([replace(asked[0], score=failed), *asked[1:]])
    assert part.index.tolist() == [[0, 1]]
    assert part.reward.tolist() == [3.0, 4.0]
    assert batch_of([replace(t, score=failed) for t in asked]) is None


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("--sync.mode=barrier", "sync.mode is barrier, but with objective.kind a3c searchers send"),
        (
            "--search.precision=bfloat16",
            "search.precision is bfloat16, but with objective.kind a3c",
        ),
        ("--buffer.max_reuse=2", "buffer.max_reuse is 2, but with objective.kind a3c searchers"),
        ("--buffer.max_staleness=99", "buffer.max_staleness is 99, but with objective.kind a3c"),
    ],
)
def test_what_cannot_go_with_gradients_is_refused(setting, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(["arithmetic"], ["--objective.kind=a3c", setting])


def test_given_pairs_bring_no_gradients(tmp_path):
    with pytest.raises(ValidationError, match=r"buffer\.given is pairs, but with objective"):
        tiny_config(tmp_path, objective=OBJECTIVE, buffer={"given": "pairs"})
