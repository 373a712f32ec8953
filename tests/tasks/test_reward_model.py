"""Rewards by a model: the same as transformers gives one text at a time, whatever pads a batch."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tba.errors import ModelError, UserCodeError
from tba.records import Outcome, Query
from tba.tasks import RewardSpec, Scorer
from tba.tasks.reward_model import RewardModel
from tiny_classifiers import CHARACTERS, EOS, PAD, tiny_classifier

PROMPTS = ["a+b=", "abcdefgh: ", "x", "a+b=", "0123456789"]
COMPLETIONS = ["ab", "long answer of many", "", "ba", "9"]
ID = {character: 2 + i for i, character in enumerate(CHARACTERS)}


def ids(text):
    return [ID[character] for character in text]


def logits_alone(folder, tokens):
    """Return the logits that transformers gives for one text without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(
    ("family", "pad"),
    [
        ("llama", PAD),
        ("llama", EOS),
        ("llama", None),
        ("gpt2", None),
        ("gpt_neox", PAD),
        ("roberta", PAD),
    ],
)
def test_rewards_are_those_of_each_text_alone(tmp_path, family, pad):
    folder = tiny_classifier(tmp_path, family, pad=pad)
    expected = [
        logits_alone(folder, [*ids(prompt + completion), EOS])[0].item()
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    assert np.std(expected) > 0.05
    for batch_size in (1, 2, 8):
        rewards = RewardModel(folder, batch_size=batch_size)(PROMPTS, COMPLETIONS)
        np.testing.assert_allclose(rewards, expected, atol=1e-5)


def test_a_given_end_is_not_written_twice(tmp_path):
    folder = tiny_classifier(tmp_path)
    once, given = RewardModel(folder)(["ab", "ab"], ["c", "c<eos>"])
    assert once == pytest.approx(given)
    assert once == pytest.approx(logits_alone(folder, [*ids("abc"), EOS])[0].item(), abs=1e-5)


def test_half_precision_changes_rewards_a_little(tmp_path):
    folder = tiny_classifier(tmp_path)
    full, half = (
        RewardModel(folder, dtype=dtype)(PROMPTS, COMPLETIONS) for dtype in ("float32", "bfloat16")
    )
    assert half != full
    np.testing.assert_allclose(half, full, atol=0.05)


def test_a_label_of_several_is_rewarded_by_its_log_probability(tmp_path):
    folder = tiny_classifier(tmp_path, id2label={0: "good", 1: "bad"}, num_labels=2)
    expected = logits_alone(folder, [*ids("ab"), EOS]).log_softmax(0)
    assert RewardModel(folder, label="bad")(["a"], ["b"]) == pytest.approx([expected[1].item()])
    assert RewardModel(folder, label="0")(["a"], ["b"]) == pytest.approx([expected[0].item()])


def test_labels_that_exclude_nothing_have_probabilities_of_their_own(tmp_path):
    folder = tiny_classifier(tmp_path, num_labels=3, problem_type="multi_label_classification")
    expected = torch.nn.functional.logsigmoid(logits_alone(folder, [*ids("ab"), EOS]))[2].item()
    assert RewardModel(folder, label="LABEL_2")(["a"], ["b"]) == pytest.approx([expected])


def test_of_a_text_that_is_too_long_the_end_counts(tmp_path):
    folder = tiny_classifier(tmp_path)
    expected = logits_alone(folder, [*ids("efgh"), EOS])[0].item()
    assert RewardModel(folder, max_length=5)(["abcd"], ["efgh"]) == pytest.approx([expected])
    long, same = RewardModel(folder)(["a" * 100, "a" * 60], ["b", "b"])  # 48 positions
    assert long == pytest.approx(same)


def test_messages_are_read_by_the_models_chat_template(tmp_path):
    folder = tiny_classifier(tmp_path, chat=True)
    expected = logits_alone(folder, ids("[u]hi[a]yes"))[0].item()
    messages = [{"role": "user", "content": "hi"}]
    answer = [{"role": "assistant", "content": "yes"}]
    assert RewardModel(folder)([messages], [answer]) == pytest.approx([expected], abs=1e-5)
    assert RewardModel(folder, chat=True)(["hi"], ["yes"]) == pytest.approx([expected], abs=1e-5)


def test_a_classifier_may_read_the_completion_alone(tmp_path):
    folder = tiny_classifier(tmp_path)
    expected = logits_alone(folder, [*ids(": yes"), EOS])[0].item()
    alone = RewardModel(folder, template=": {completion}")
    messages = [{"role": "user", "content": "hi"}]
    answer = [{"role": "assistant", "content": "yes"}]
    assert alone(["hi"], ["yes"]) == pytest.approx([expected], abs=1e-5)
    assert alone([messages], [answer]) == pytest.approx([expected], abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "label", "message"),
    [
        ({"num_labels": 2}, None, "labels LABEL_0, LABEL_1: name the label"),
        ({"num_labels": 2}, "nice", "no label 'nice': choose one of LABEL_0, LABEL_1"),
        ({"num_labels": 2}, "7", "no label '7'"),
        ({}, "nice", "has one only"),
    ],
)
def test_a_label_that_cannot_be_is_refused(tmp_path, settings, label, message):
    folder = tiny_classifier(tmp_path, **settings)
    with pytest.raises(ModelError, match=message):
        RewardModel(folder, label=label)


def test_a_language_model_is_no_reward_model(policy, tmp_path):
    with pytest.raises(ModelError, match=r"score\.weight: it is no reward model; train one by tba"):
        RewardModel(str(tmp_path))


def test_messages_need_a_chat_template(tmp_path):
    model = RewardModel(tiny_classifier(tmp_path))
    with pytest.raises(ModelError, match="no chat template, but prompts are messages"):
        model([[{"role": "user", "content": "hi"}]], [[{"role": "assistant", "content": "a"}]])


def spec(folder, **settings):
    options = {"name": str(folder), "device": "cpu"}
    name = "tba.tasks.reward_model:RewardModel"
    return RewardSpec((name,), (1.0,), 60.0, (options,), 120.0, **settings)


def query(prompt):
    return Query(0, prompt, np.zeros(1, dtype=np.int32), {"prompt": prompt})


def test_the_scoring_process_rewards_with_it_and_penalises_a_missing_end(tmp_path):
    folder = tiny_classifier(tmp_path)
    tokens = [np.array(own, dtype=np.int32) for own in ([5, 9], [5, 7], [5, 6], [])]
    with Scorer(spec(folder, missing_eos_penalty=-7.5, eos_ids=(9, 6))) as scorer:
        scores = scorer.score([query("a")] * 4, ["b", "b", "c", ""], tokens)
    assert [s.outcome for s in scores] == [Outcome.OK] * 4
    expected = [logits_alone(folder, [*ids("a" + text), EOS])[0].item() for text in "bc"]
    # the penalty takes the place of the reward: it is not added to it
    assert [s.reward for s in scores] == pytest.approx(
        [expected[0], -7.5, expected[1], -7.5], abs=1e-5
    )


def test_a_model_that_cannot_be_loaded_is_refused_on_entering(tmp_path):
    with (
        pytest.raises(
            UserCodeError, match=r"task\.judge \(m\) cannot be used: .* has no config\.json"
        ),
        Scorer(dataclasses.replace(spec(tmp_path), setting="task.judge (m)")),
    ):
        pass
