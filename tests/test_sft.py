"""Supervised fine-tuning, whole: loss, epochs, resumption, what comes out, what is refused."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import tba
from tba.cli import app
from tba.config import BuildConfig, Config, ModelConfig
from tba.config.sft import load_sft_config
from tba.policy.build import build_policy
from tba.policy.loading import Policy, load_policy
from tba.records import Batch
from tba.run.rollouts import RolloutLog
from tba.update import PolicyUpdate, micro_batches
from tba.warm_start import supervised_batch
from tiny_runs import final_tensors, metrics, rollouts

runner = CliRunner()
ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(4) for b in range(9)]
HELD_OUT = [{"prompt": f"{a}+{a}=", "completion": str(a + a)} for a in range(4, 8)]
SMALL = [
    "--trainer.queries_per_batch=6",
    "--trainer.micro_batch_tokens=64",
    "--trainer.learning_rate=1e-2",
    "--search.max_completion_length=5",
    "--task.max_prompt_length=8",
    "--runtime.kind=inline",
]


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Stand beside a model folder and its rows."""
    monkeypatch.chdir(tmp_path)
    build = BuildConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    build_policy(build, tmp_path / "model", seed=0)
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "test.jsonl", HELD_OUT)
    return tmp_path


def arguments(*more: str) -> list[str]:
    files = ["--task.train_file=train.jsonl", "--task.test_file=test.jsonl"]
    return ["--model.model_name_or_path=model", *files, *SMALL, *more]


def invoke(*more: str, run: str = "run"):
    return runner.invoke(app, ["sft", *arguments(*more), "--run-dir", run])


def plain_loss(folder: Path, rows) -> float:
    """Return nats a token by Transformers' own loss over labels, row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = count = 0
    for row in rows:
        asked = tokenizer(row["prompt"])["input_ids"]
        answered = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor([asked + answered])
        labels = torch.tensor([[-100] * len(asked) + answered])
        with torch.no_grad():
            total += model(ids, labels=labels).loss.item() * len(answered)
        count += len(answered)
    return total / count


# --- the step -----------------------------------------------------------------------------------


def supervised(policy: Policy, **trainer: object) -> PolicyUpdate:
    overrides = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    config = load_sft_config([], [*arguments(), *overrides])
    return PolicyUpdate(policy.model, config, policy.eos_ids)


def demonstrations(seed: int = 0, count: int = 7) -> Batch:
    rng = np.random.default_rng(seed)

    def ids(longest: int) -> np.ndarray:
        return rng.integers(2, 14, size=rng.integers(1, longest)).astype(np.int32)

    return supervised_batch([ids(8) for _ in range(count)], [ids(6) for _ in range(count)])


def gradient(policy: Policy, batch: Batch, budget: int) -> tuple[float, torch.Tensor]:
    update = supervised(policy, max_grad_norm=1e9, micro_batch_tokens=budget)
    update.optimizer.step = lambda: None
    loss = update.step(batch, 0).metrics["loss"]
    return loss, torch.cat([w.grad.flatten() for w in policy.model.parameters()])


def test_micro_batches_give_the_loss_and_gradient_of_the_whole_batch(policy):
    batch = demonstrations()
    assert len(list(micro_batches(batch, 13))) > 2
    loss, whole = gradient(policy, batch, 4_096)
    for budget in (13, 25):
        cut_loss, cut = gradient(policy, batch, budget)
        assert cut_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)


def test_loss_and_gradient_are_those_of_transformers_labels(policy):
    batch = demonstrations(seed=1)
    loss, found = gradient(policy, batch, 4_096)
    longest = max(len(p) + len(t) for p, t in zip(batch.prompts, batch.tokens, strict=True))
    ids = torch.zeros(len(batch.prompts), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(zip(batch.prompts, batch.tokens, strict=True)):
        both = np.concatenate([prompt, answer])
        ids[row, : len(both)] = torch.from_numpy(both)
        labels[row, len(prompt) : len(both)] = torch.from_numpy(answer)
    plain = type(policy.model)(policy.model.config)
    plain.load_state_dict(policy.model.state_dict())
    plain.set_attn_implementation("eager")
    # padding is on the right, behind everything that is predicted
    theirs = plain.eval()(ids, labels=labels).loss
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    expected = torch.cat([w.grad.flatten() for w in plain.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


# --- the command --------------------------------------------------------------------------------


def test_the_command_fine_tunes_and_leaves_an_ordinary_folder(place):
    result = invoke("--trainer.steps=60", "--checkpoint.every=0")
    assert result.exit_code == 0, result.output
    lines, run = metrics(place / "run"), place / "run"
    assert lines[0]["loss"] > 2
    assert np.mean([line["loss"] for line in lines[-5:]]) < 1.4
    policy = run / "checkpoints/step-00000060/policy"
    assert f"the policy, a Hugging Face folder, is {policy.relative_to(place)}" in result.stdout
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ended"] == "finished"
    for name, folder in (("before", place / "model"), ("after", policy)):
        report = summary[name]
        assert report["measured"]["loss"] == pytest.approx(plain_loss(folder, HELD_OUT), rel=1e-4)
        assert (report["sampled_pass_at_1"], report["mean_response_tokens"]) == (None, None)
    assert summary["after"]["measured"]["loss"] < summary["before"]["measured"]["loss"]
    assert "loss" in result.stdout
    assert "an epoch is 6 steps" in result.stderr
    assert "held-out" in result.stdout
    told = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval_loss"] for line in told if "eval_loss" in line] == [
        summary[name]["measured"]["loss"] for name in ("before", "after")
    ]
    ours = load_policy(policy, ModelConfig(), device=torch.device("cpu"), dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5, 6]])
    plain = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, ours.model(ids).logits, rtol=0, atol=1e-5)


def test_a_reward_function_adds_accuracy_before_and_after(place):
    (place / "judge.py").write_text(
        "def right(completions, completion, **columns):\n"
        "    return [float(a == b) for a, b in zip(completions, completion)]\n"
    )
    summary = tba.sft(
        run_dir="run",
        progress=False,
        **dict(text.removeprefix("--").split("=") for text in arguments()[:3]),
        **{"task.reward": ["judge.py:right"], "trainer.steps": 2, "runtime.kind": "inline"},
        **{"search.max_completion_length": 5},
    )
    assert summary.before.measured.keys() == {"loss", "reward"}
    assert summary.before.sampled_pass_at_1 is not None


def test_an_evaluation_beside_the_run_measures_the_loss_too(place):
    result = invoke(
        "--runtime.kind=local", "--trainer.steps=6", "--evaluation.every=2", "--checkpoint.every=0"
    )
    assert result.exit_code == 0, result.output
    (report, *_) = sorted((place / "run/evaluations").iterdir())
    assert 0 < json.loads(report.read_text())["measured"]["loss"] < 5


def test_an_epoch_draws_each_row_once(place):
    assert invoke("--trainer.steps=12", "--trainer.queries_per_batch=9").exit_code == 0
    with RolloutLog(place / "run/rollouts.arrows") as log:
        assert sum(batch.num_rows for batch in log.read()) == len(ROWS)
    (newest,) = (place / "run/checkpoints").iterdir()
    from safetensors.numpy import load_file

    uses = load_file(newest / "buffer.safetensors")["uses"]
    assert Counter(uses.tolist()) == {3: 36}, "12 steps of 9 are three epochs of 36 rows"


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_a_killed_run_resumed_is_bit_for_bit_the_whole_one(place, monkeypatch, kind):
    class Killed(BaseException):
        pass

    settings = (f"--runtime.kind={kind}", "--trainer.steps=8", "--checkpoint.every=2")
    assert invoke(*settings, run="whole").exit_code == 0
    step = PolicyUpdate.step

    def killed(update, batch, number):
        if number == 5:
            raise Killed
        return step(update, batch, number)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyUpdate, "step", killed)
        with pytest.raises(Killed):
            tba.api.run(load_sft_config([], arguments(*settings)), Path("run"), progress=False)
    result = runner.invoke(app, ["train", "--resume", "run"])
    assert result.exit_code == 0, result.output
    whole = final_tensors(place / "whole")
    for name, tensor in final_tensors(place / "run").items():
        assert torch.equal(tensor, whole[name]), name
    assert len(rollouts(place / "run")) == len(ROWS)
    summaries = [json.loads((place / run / "summary.json").read_text()) for run in ("run", "whole")]
    for when in ("before", "after"):
        one, other = (summary[when]["measured"] for summary in summaries)
        assert one == other


def test_conversations_teach_their_last_message(place):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}=" + "{% endfor %}"
    tokenizer.save_pretrained("model")
    said = [("1+1", "2"), ("2+2", "4"), ("3+3", "6")]
    rows = [
        {
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answered},
            ]
        }
        for asked, answered in said
    ]
    write(place / "train.jsonl", rows)
    write(place / "test.jsonl", rows[:1])
    result = invoke("--trainer.steps=2")
    assert result.exit_code == 0, result.output
    logged = {(tokenizer.decode(r["prompt_ids"]), r["text"]) for r in rollouts(place / "run")}
    assert logged == {(f"{asked}=", answered) for asked, answered in said}
    assert "loss" in result.stdout, "the held-out one as well"


def test_a_task_with_demonstrations_of_its_own_needs_no_rows(tmp_path):
    overrides = {
        "model.build.hidden_size": 16,
        "model.build.num_hidden_layers": 1,
        "model.build.intermediate_size": 16,
        "task.train_queries": 40,
        "task.test_queries": 6,
        "trainer.steps": 3,
        "trainer.queries_per_batch": 8,
        "runtime.kind": "inline",
    }
    summary = tba.sft("arithmetic", run_dir=tmp_path / "run", progress=False, **overrides)
    assert summary.after.measured["loss"] < summary.before.measured["loss"]
    assert math.isfinite(summary.after.measured["reward"])
    assert summary.tokens_searched == 0


# --- what is left out and refused -----------------------------------------------------------------


def test_answers_that_are_too_long_are_left_out_and_told(place):
    write(place / "train.jsonl", [*ROWS, {"prompt": "1+1=", "completion": "12345"}])
    write(place / "test.jsonl", [*HELD_OUT, {"prompt": "1+1=", "completion": "12345"}])
    result = invoke("--trainer.steps=1")
    assert result.exit_code == 0, result.output
    told = "skipped given demonstrations: 1 with an answer longer than search.max_completion_length"
    assert told in result.stderr
    assert len(rollouts(place / "run")) == len(ROWS)
    before = json.loads((place / "run/summary.json").read_text())["before"]["measured"]["loss"]
    assert before == pytest.approx(plain_loss(place / "model", HELD_OUT), rel=1e-4)


def test_held_out_rows_need_no_demonstration(place):
    write(place / "test.jsonl", [HELD_OUT[0], {"prompt": "1+1="}, HELD_OUT[1]])
    assert invoke("--trainer.steps=1").exit_code == 0
    summary = json.loads((place / "run/summary.json").read_text())
    expected = plain_loss(place / "model", HELD_OUT[:2])
    assert summary["before"]["measured"]["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [{"prompt": "1+1=", "answer": "2"}],
            "row 1 of {} has no demonstration: it needs a column",
        ),
        (
            [ROWS[0], {"prompt": "1", "completion": " "}],
            "completion of row 2 of {} is empty: write",
        ),
        ([{"prompt": "1", "response": 3}], "response of row 1 of {} is 3, expected a text or"),
        ([{"prompt": "1", "completion": "x"}], "the tokenizer cannot read an answer, 'x'"),
        ([{"prompt": "1", "completion": "123456"}], "none of the given demonstrations can be used"),
    ],
)
def test_bad_rows_are_refused_in_one_sentence_and_leave_no_run(place, rows, words):
    write(place / "train.jsonl", rows)
    result = invoke()
    assert result.exit_code == 2, result.output
    sentence = result.stderr.strip().splitlines()[-1]
    assert words.format((place / "train.jsonl").resolve()) in sentence
    assert not (place / "run/config.json").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "nothing to train is named: give a recipe (arithmetic, "),
        (["--rundir", "x"], "there is no option --rundir (did you mean --run-dir?)"),
        (["arithmetic", "--objective.kind=grpo"], "objective.kind grpo"),
        (["arithmetic", "--search.temperature=0.7"], "search.temperature is 0.7"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(more, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["sft", *more, "--dry-run"] if more else ["sft"])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_dry_run_prints_a_configuration_that_train_would_run(tmp_path):
    result = runner.invoke(app, ["sft", "arithmetic", "--dry-run"])
    file = tmp_path / "sft.toml"
    file.write_text(result.stdout)
    config = tba.load_config([str(file)])
    assert isinstance(config, Config)
    assert config == load_sft_config(["arithmetic"])


def test_the_example_of_the_page_trains(place):
    page = (Path(__file__).parents[1] / "docs/sft.md").read_text(encoding="utf-8")
    (rows,) = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    (command,) = re.findall(r"```sh\ntba (.*?)\n```", page, flags=re.DOTALL)
    build = BuildConfig(characters="abc=", hidden_size=16, intermediate_size=32)
    build_policy(build, place / "letters", seed=0)
    Path("rows.jsonl").write_text(rows)
    small = [
        "--trainer.steps=3",
        "--runtime.kind=inline",
        "--run-dir=run",
        "--task.max_prompt_length=8",
    ]
    result = runner.invoke(app, [*command.replace("DIR", "letters").split(), *small])
    assert result.exit_code == 0, result.output
    assert len(rollouts(place / "run")) == 5, "one of six rows is held out"
