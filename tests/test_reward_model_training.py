"""Reward models are trained from pairs, and order pairs that they have not seen."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from tba import reward_model_training
from tba.cli import app
from tba.config.reward_model import RewardModelConfig
from tba.errors import DataError, DivergedError, ModelError
from tba.reward_model_training import (
    PairTokens,
    _passes,
    measure,
    read_pair_rows,
    start_from,
    tokenize_pairs,
    train_reward_model,
)
from tba.tasks.reward_model import Reader, RewardModel
from tiny_classifiers import EOS, PAD, character_tokenizer, tiny_classifier
from tiny_preferences import language_model, pairs, write


def test_a_trained_model_orders_held_out_pairs_and_is_an_ordinary_folder(tmp_path):
    base = language_model(tmp_path / "base")
    config = RewardModelConfig(model=base, epochs=3, batch_size=16, learning_rate=3e-3)
    files = [write(tmp_path / "a.jsonl", pairs(300)), write(tmp_path / "b.jsonl", pairs(100, 1))]
    told = []
    out = tmp_path / "rm"
    trained = train_reward_model(files, config, out=out, tell=told.append)
    assert told[0] == "360 pairs to learn from, 40 held out"
    assert trained.steps == 3 * math.ceil(360 / 16)
    assert trained.before.accuracy < 0.9
    assert trained.after.loss < 0.5 * trained.before.loss

    unseen = pairs(200, seed=7)
    reward = RewardModel(str(out))
    prompts = [row["prompt"] for row in unseen]
    better, worse = (
        reward(prompts, [row[name] for row in unseen]) for name in ("chosen", "rejected")
    )
    assert np.mean(np.array(better) > np.array(worse)) > 0.95
    assert trained.after.accuracy > 0.95

    # it is read by transformers alone, and rewards there as here
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    text = f"{prompts[0]}{unseen[0]['chosen']}<eos>"
    with torch.no_grad():
        alone = model(**tokenizer(text, return_tensors="pt")).logits.item()
    assert alone == pytest.approx(better[0], abs=1e-4)


def test_each_step_in_bfloat16_goes_on_from_the_last(tmp_path, monkeypatch):
    step = reward_model_training._step
    gaps = []

    def watched(model, batch, optimiser):
        loss = step(model, batch, optimiser)
        learning = reward_model_training._rewards(model, batch).detach()
        with torch.inference_mode():  # autocast keeps no weights here
            gaps.append((learning - reward_model_training._rewards(model, batch)).abs().max())
        return loss

    monkeypatch.setattr(reward_model_training, "_step", watched)
    config = RewardModelConfig(
        model=language_model(tmp_path / "base"),
        batch_size=16,
        learning_rate=3e-3,
        precision="bfloat16",
    )
    file = write(tmp_path / "a.jsonl", pairs(100))
    train_reward_model([file], config, out=tmp_path / "rm", tell=lambda text: None)
    assert len(gaps) == math.ceil(90 / 16)
    assert max(gaps) < 1e-3  # weights of the first step would answer otherwise


def test_the_loss_and_its_gradient_do_not_depend_on_how_a_batch_is_parted(tmp_path, monkeypatch):
    base = language_model(tmp_path)
    model, tokenizer = start_from(base, 0, torch.device("cpu"))
    read = tokenize_pairs(pairs(9), Reader(tokenizer, base, 64), "the pairs")

    def step():
        own, _ = start_from(base, 0, torch.device("cpu"))
        optimiser = torch.optim.SGD(own.parameters(), lr=0.0)
        loss = reward_model_training._step(own, read, optimiser)
        return loss, own.score.weight.grad

    whole, gradient = step()
    monkeypatch.setattr(reward_model_training, "TOKENS_A_PASS", 60)
    assert len(list(_passes(read))) > 3
    parted, parted_gradient = step()
    # by hand: mean of log(1 + exp(-(r chosen - r rejected))), each text alone
    reward = [
        [model(input_ids=torch.tensor([text])).logits.item() for text in (p.chosen, p.rejected)]
        for p in read
    ]
    by_hand = np.mean([math.log1p(math.exp(-(chosen - rejected))) for chosen, rejected in reward])
    assert whole == pytest.approx(by_hand, abs=1e-5)
    assert parted == pytest.approx(by_hand, abs=1e-5)
    torch.testing.assert_close(parted_gradient, gradient, atol=1e-5, rtol=1e-4)


def test_passes_hold_at_most_so_many_tokens_and_one_pair_at_least(monkeypatch):
    monkeypatch.setattr(reward_model_training, "TOKENS_A_PASS", 24)
    widths = [3, 4, 5, 1, 20, 2, 2]
    found = list(_passes([PairTokens([0] * n, [0]) for n in widths]))
    assert [[len(pair.chosen) for pair in part] for part in found] == [[3, 4], [5, 1], [20], [2, 2]]


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_what_is_learned_is_a_function_of_the_seed(tmp_path, pad):
    base = language_model(tmp_path / "base", pad)
    file = write(tmp_path / "rows.jsonl", pairs(40))

    def learned(name, **settings):
        config = RewardModelConfig(model=base, batch_size=8, learning_rate=1e-3, **settings)
        out = tmp_path / name
        train_reward_model([file], config, out=out, tell=lambda text: None)
        return RewardModel(str(out))(["x:", "y:"], ["abc", "aei"])

    torch.manual_seed(5)
    first = learned("first")
    torch.manual_seed(6)
    assert learned("again") == first
    assert learned("other", seed=1) != first


def test_ties_count_half_in_accuracy(tmp_path):
    model, _ = start_from(language_model(tmp_path), 0, torch.device("cpu"))
    with torch.no_grad():
        model.score.weight.zero_()
    found = measure(model, [PairTokens([3, 4], [5]), PairTokens([6], [7, 8])])
    assert (found.accuracy, found.mean, found.std) == (0.5, 0.0, 0.0)
    assert found.loss == pytest.approx(math.log(2))


def test_pairs_without_a_difference_teach_nothing(tmp_path):
    rows = [{"prompt": "x:", "chosen": "abc", "rejected": "xbc"}]
    reader = Reader(character_tokenizer(), "base", 3)
    with pytest.raises(DataError, match=r"none of the pairs .* once cut to 3 tokens"):
        tokenize_pairs(rows, reader, "the pairs")


def test_a_row_without_a_pair_is_named(tmp_path):
    file = write(tmp_path / "rows.jsonl", [*pairs(1), {"prompt": "x:", "chosen": "a"}])
    with pytest.raises(DataError, match=r"row 2 of .*rows\.jsonl has no column 'rejected'"):
        read_pair_rows([file])


def test_a_model_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        start_from(str(tmp_path), 0, torch.device("cpu"))


def test_a_model_that_training_has_destroyed_is_not_written(tmp_path):
    base = language_model(tmp_path / "base")
    files = [write(tmp_path / "a.jsonl", pairs(30))]
    config = RewardModelConfig(model=base, batch_size=8, learning_rate=1e30)
    with pytest.raises(DivergedError, match=r"set a lower --learning-rate"):
        train_reward_model(files, config, out=tmp_path / "rm", tell=lambda text: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "base"]


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(reward_model_training, "_train", lambda *_: pytest.fail("it trained"))
    base = language_model(tmp_path / "base")
    file = write(tmp_path / "a.jsonl", pairs(30))
    done = command(file, "--model", base, "--out", file / "rm")
    assert done.exit_code == 2
    assert "rm cannot be made (Not a directory): name another folder" in done.stderr


def command(*arguments):
    return CliRunner().invoke(app, ["reward-model", *map(str, arguments)])


def test_command_trains_and_says_what_came_of_it(tmp_path):
    base = language_model(tmp_path / "base")
    file = write(tmp_path / "rows.jsonl", pairs(30))
    test = write(tmp_path / "test.jsonl", pairs(10, seed=1))
    out = tmp_path / "rm"
    done = command(file, "--model", base, "--out", out, "--test-file", test, "--batch-size", 8)
    assert done.exit_code == 0, done.output
    words = " ".join(done.stdout.replace("│", " ").split())
    assert "4 steps" in words
    assert "accuracy" in words
    assert f"the reward model is in {out}" in words
    assert len(RewardModel(str(out))(["x:"], ["a"])) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", 0], "--epochs is 0: Input should be greater than 0"),
        (["--test-share", 1.5], "--test-share is 1.5: Input should be less than 1"),
        (["--precision", "float16"], "'float16' is not one of"),
        (["--device", "tpu"], "device is 'tpu', expected auto, cpu, cuda or cuda:N"),
    ],
)
def test_command_refuses_wrong_settings_in_a_sentence(tmp_path, options, message):
    file = write(tmp_path / "rows.jsonl", pairs(4))
    done = command(file, "--model", tmp_path, "--out", tmp_path / "rm", *options)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "rm").exists()


def test_command_leaves_a_folder_that_exists_as_it_is(tmp_path):
    folder = tiny_classifier(tmp_path / "rm")
    file = write(tmp_path / "rows.jsonl", pairs(4))
    done = command(file, "--model", folder, "--out", folder)
    assert done.exit_code == 2
    assert "exists already and is left as it is: name a new folder" in done.stderr
