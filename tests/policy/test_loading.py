import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BloomConfig, BloomForCausalLM

from tba.config import BuildConfig, ModelConfig
from tba.engines import Sampling
from tba.engines.torch_engine import TorchEngine
from tba.errors import ConfigError, ModelError
from tba.policy import build_policy, load_policy
from tba.policy.loading import check_positions
from tba.records import Query


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    config = BuildConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    build_policy(config, folder, seed=0)
    return folder


@pytest.fixture
def folder(built, tmp_path):
    return shutil.copytree(built, tmp_path / "policy")


def _load(folder, **settings):
    return load_policy(
        folder, ModelConfig(**settings), device=torch.device("cpu"), dtype=torch.float32
    )


def _edit_json(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def _message(folder):
    with pytest.raises(ModelError) as caught:
        _load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_loads_what_was_built(folder):
    policy = _load(folder)
    assert policy.model.dtype == torch.float32
    assert not policy.model.training
    assert policy.eos_ids == (policy.tokenizer.eos_token_id,)
    assert policy.tokenizer.pad_token_id != policy.eos_ids[0]
    assert policy.tokenizer.padding_side == "left"


def test_weights_take_the_asked_precision(folder):
    policy = load_policy(folder, ModelConfig(), device=torch.device("cpu"), dtype=torch.bfloat16)
    assert {weight.dtype for weight in policy.model.parameters()} == {torch.bfloat16}


def test_gradient_checkpointing_puts_the_model_into_training_mode(folder):
    assert _load(folder, gradient_checkpointing=True).model.training


def test_dropout_is_off_even_in_training_mode(folder):
    _edit_json(folder / "config.json", attention_dropout=0.5)
    model = _load(folder).model.train()
    ids = torch.tensor([[2, 3, 4, 5]])
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert all(m.p == 0 for m in model.modules() if isinstance(m, nn.Dropout))


def test_a_tokenizer_without_padding_pads_with_end_of_sequence(folder):
    path = folder / "tokenizer_config.json"
    _edit_json(path, pad_token=None)
    policy = _load(folder)
    assert policy.tokenizer.pad_token_id == policy.eos_ids[0] == policy.tokenizer.eos_token_id


def test_stop_tokens_of_the_generation_config_that_the_tokenizer_knows_are_added(folder):
    _edit_json(folder / "generation_config.json", eos_token_id=[5, 9_999, 1])
    assert _load(folder).eos_ids == (1, 5)


def test_nothing_else_of_the_generation_config_reaches_sampling(folder):
    ids = np.array(_load(folder).tokenizer("12+3=")["input_ids"], dtype=np.int32)

    def sample():
        policy = _load(folder)
        engine = TorchEngine(policy.model, policy.eos_ids)
        generator = torch.Generator().manual_seed(0)
        (found,) = engine.generate([Query(0, "", ids)], Sampling(20, 1.0, 8), generator)
        return found

    plain = sample()
    _edit_json(
        folder / "generation_config.json",
        do_sample=True,
        temperature=0.1,
        top_k=1,
        top_p=0.5,
        repetition_penalty=5.0,
        max_new_tokens=2,
    )
    for before, after in zip(plain, sample(), strict=True):
        np.testing.assert_array_equal(before.tokens, after.tokens)
        np.testing.assert_array_equal(before.log_mu, after.log_mu)


@pytest.mark.parametrize("name", ["nowhere/at/all", "./nowhere", "/nowhere", "nobody/nothing"])
def test_a_missing_folder_is_named(name):
    assert "nowhere" in _message(name) or "nobody" in _message(name)


def test_a_missing_folder_inside_an_existing_one_is_not_sought_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert "does not exist" in _message("models/tiny")


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "no *.safetensors" in _message(folder)


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    assert "no config.json" in _message(folder)


def test_a_run_folder_is_refused_with_the_path_of_its_newest_policy(folder):
    for step in (100, 200):
        policy = folder / f"checkpoints/step-{step:08d}/policy"
        policy.mkdir(parents=True)
        (policy / "config.json").write_text("{}")
    (folder / "config.json").unlink()
    assert f"give {policy}, its newest policy" in _message(folder)


def test_an_end_of_sequence_token_beyond_the_embeddings_is_refused(folder):
    policy = _load(folder)
    policy.tokenizer.add_special_tokens({"eos_token": "<new end>"})
    policy.tokenizer.save_pretrained(folder)
    assert "resize the model's embeddings" in _message(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[]"),
        ("config.json", '{"model_type": "llama", "hidden_size": 10, "num_attention_heads": 3}'),
        ("tokenizer.json", "[]"),
    ],
)
def test_a_damaged_file_is_refused(folder, file, content):
    (folder / file).write_text(content)
    assert "No model could be loaded" in _message(folder)


def test_a_home_that_does_not_exist_is_a_folder_that_does_not_exist():
    with pytest.raises(ModelError, match="~nobody-of-that-name/m does not exist"):
        _load("~nobody-of-that-name/m")


def test_prompts_that_run_beyond_the_models_positions_are_refused(folder):
    model = _load(folder).model
    known = model.config.max_position_embeddings
    query = Query(0, "", np.zeros(known - 6, dtype=np.int32))
    check_positions(model, [query], completion=6)
    with pytest.raises(ConfigError, match=f"longest prompt has {known - 6} tokens .* is 7, but"):
        check_positions(model, [query], completion=7)


def test_truncated_weights_are_refused(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "safetensors" in _message(folder)


def test_missing_tensors_are_refused(folder):
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "model.norm.weight" in _message(folder)


def test_tensors_of_another_shape_are_refused(folder):
    _edit_json(folder / "config.json", intermediate_size=64)
    _message(folder)


def test_a_tokenizer_without_end_of_sequence_is_refused(folder):
    _edit_json(folder / "tokenizer_config.json", eos_token=None)
    assert "no end-of-sequence token" in _message(folder)


def test_a_model_with_attention_of_its_own_is_refused(folder):
    policy = _load(folder)
    config = BloomConfig(vocab_size=len(policy.tokenizer), hidden_size=32, n_layer=1, n_head=4)
    BloomForCausalLM(config).save_pretrained(folder)
    assert "BloomForCausalLM) computes its attention itself" in _message(folder)


def test_chunked_attention_is_refused(folder):
    _edit_json(folder / "config.json", layer_types=["chunked_attention", "full_attention"])
    assert "has layers of kind chunked_attention" in _message(folder)


def test_a_damaged_config_is_refused(folder):
    (folder / "config.json").write_text("{")
    _message(folder)
