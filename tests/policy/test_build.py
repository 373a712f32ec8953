import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.config import BuildConfig
from tba.policy import build_policy

CONFIG = BuildConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2)


@pytest.fixture
def folder(tmp_path):
    build_policy(CONFIG, tmp_path, seed=0)
    return tmp_path


def test_the_tokenizer_has_one_token_a_character_and_no_more(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("123+45=")["input_ids"]
    assert len(ids) == 7
    assert len(tokenizer) == len(CONFIG.characters) + 2
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"


def test_decoding_gives_the_text_back_without_spaces(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("-12+345=")["input_ids"]
    assert tokenizer.decode(ids) == "-12+345="
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "-12+345="


def test_an_alphabet_may_hold_blanks_and_repeat_itself(tmp_path):
    build_policy(CONFIG.model_copy(update={"characters": "ab \nba"}), tmp_path, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 6
    assert tokenizer.decode(tokenizer("a b\n\nb")["input_ids"]) == "a b\n\nb"


def test_the_model_reloads_with_the_configured_shape(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(CONFIG.characters) + 2
    assert model.config.num_hidden_layers == 2
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id


def test_weights_depend_on_the_seed_alone(tmp_path):
    state = torch.random.get_rng_state()
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build_policy(CONFIG, tmp_path / name, seed)
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    first, same, other = weights
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(state, torch.random.get_rng_state())
