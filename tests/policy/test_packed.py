import numpy as np
import pytest
import torch

from tba.policy.packed import prompt_pass
from tiny_models import FAMILIES, VOCABULARY, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_pass_leaves_states_keys_and_values_of_each_prompt_by_itself(family):
    model = tiny_model(family)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, n).astype(np.int32) for n in (5, 2, 8)]
    with torch.no_grad():
        found = prompt_pass(model, prompts)
        for at, prompt in enumerate(prompts):
            ids = torch.from_numpy(prompt).long()[None]
            alone = model.base_model(input_ids=ids, use_cache=True)
            cache = alone["cache" if "cache" in alone else "past_key_values"]
            torch.testing.assert_close(
                found.states[at], alone.last_hidden_state[0, -1], rtol=1e-5, atol=1e-5
            )
            for layer, cached in enumerate(cache.layers):
                # A window's cache holds the last tokens only.
                kept = cached.keys.shape[2]
                own = slice(found.starts[at + 1] - kept, found.starts[at + 1])
                for packed, wanted in (
                    (found.keys[layer], cached.keys[0]),
                    (found.values[layer], cached.values[0]),
                ):
                    torch.testing.assert_close(packed[:, own], wanted, rtol=1e-5, atol=1e-5)
