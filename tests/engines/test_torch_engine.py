import copy
import functools
import gc
from itertools import product

import numpy as np
import pytest
import torch

from tba.engines import Sampling, torch_engine
from tba.engines.decoding import DecodingSequences
from tba.engines.linears import quicken
from tba.engines.torch_engine import TorchEngine
from tba.records import FinishReason, Query
from tiny_models import EOS, FAMILIES, VOCABULARY, tiny_model

LONGEST = 12


def _queries(lengths=(5, 2, 8)):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, VOCABULARY, length).astype(np.int32) for length in lengths]
    return [Query(query_id=at, prompt="", prompt_ids=ids) for at, ids in enumerate(prompts)]


def _generate(model, queries, *, samples=1, temperature=1.0, longest=LONGEST, seed=0, eos=(EOS,)):
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(samples, temperature, longest)
    return TorchEngine(model, eos).generate(queries, sampling, generator)


def _full_forward_log_probs(model, query, response, temperature):
    ids = torch.from_numpy(np.concatenate([query.prompt_ids, response.tokens])).long()[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(query.prompt_ids) - 1 : -1]
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(1, torch.from_numpy(response.tokens).long()[:, None])[:, 0].numpy()


def _transformers_greedy(model, query):
    ids = torch.from_numpy(query.prompt_ids).long()[None]
    full = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=LONGEST,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    return full[0, len(query.prompt_ids) :].tolist()


@pytest.mark.parametrize("quick", [False, True], ids=["plain", "quick"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers_generate(family, quick):
    model = tiny_model(family)
    queries = _queries()
    searching = quicken(copy.deepcopy(model), "float32") if quick else model
    found = _generate(searching, queries, temperature=0.0)
    for query, (response,) in zip(queries, found, strict=True):
        assert response.tokens.tolist() == _transformers_greedy(model, query)
        expected = _full_forward_log_probs(model, query, response, 1.0)
        np.testing.assert_allclose(response.log_mu, expected, atol=1e-4)


@pytest.mark.parametrize("lengths", [(5, 2, 8), (6, 6)], ids=["ragged", "even"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_mu_equals_a_full_forward_at_the_sampling_temperature(family, lengths):
    model = tiny_model(family)
    queries = _queries(lengths)
    found = _generate(model, queries, samples=8, temperature=0.7)
    for query, responses in zip(queries, found, strict=True):
        assert len(responses) == 8
        for response in responses:
            expected = _full_forward_log_probs(model, query, response, 0.7)
            np.testing.assert_allclose(response.log_mu, expected, atol=1e-4)


def test_a_response_ends_with_its_first_stop_token_or_is_cut_at_the_limit():
    stops = (EOS, 7)
    found = _generate(tiny_model("llama"), _queries(), samples=40, eos=stops)
    responses = [response for group in found for response in group]
    stopped = [r for r in responses if r.finish_reason is FinishReason.STOP]
    cut = [r for r in responses if r.finish_reason is FinishReason.LENGTH]
    assert {int(r.tokens[-1]) for r in stopped} == set(stops)
    for response in stopped:
        assert not np.isin(response.tokens[:-1], stops).any()
    for response in cut:
        assert len(response.tokens) == LONGEST
        assert not np.isin(response.tokens, stops).any()
    assert len(stopped) > 0
    assert len(cut) > 0
    assert all(len(r.log_mu) == len(r.tokens) for r in responses)


def _all_responses(model, query, longest):
    """Every response of at most `longest` tokens and its exact probability."""
    table = {}
    for length in range(1, longest + 1):
        for head in product(range(VOCABULARY), repeat=length):
            ended = head[-1] == EOS
            if EOS not in head[:-1] and (ended or length == longest):
                table[head] = 0.0
    ids = torch.tensor([[*query.prompt_ids, *key][: len(query.prompt_ids) + 1] for key in table])
    with torch.no_grad():
        log_probs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1).double().exp()
    start = len(query.prompt_ids) - 1
    for row, key in enumerate(table):
        steps = [log_probs[row, start + at, token].item() for at, token in enumerate(key)]
        table[key] = float(np.prod(steps))
    return table


def test_sampled_frequencies_match_the_exact_distribution():
    model, (query,) = tiny_model("llama"), _queries((3,))
    exact = _all_responses(model, query, longest=2)
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-5)
    samples = 40_000
    (found,) = _generate(model, [query], samples=samples, longest=2, seed=3)
    counts = dict.fromkeys(exact, 0)
    for response in found:
        counts[tuple(response.tokens.tolist())] += 1
    often = [key for key, p in exact.items() if p * samples >= 5]
    expected = np.array([exact[key] for key in often]) * samples
    observed = np.array([counts[key] for key in often])
    rest_expected, rest_observed = samples - expected.sum(), samples - observed.sum()
    chi2 = ((observed - expected) ** 2 / expected).sum()
    chi2 += (rest_observed - rest_expected) ** 2 / rest_expected
    # Chi-square has mean n and variance 2n; four standard deviations are passed very rarely.
    assert abs(chi2 - len(often)) < 4 * np.sqrt(2 * len(often))


def _tokens(found):
    return [response.tokens.tolist() for group in found for response in group]


def test_randomness_comes_from_the_given_generator_alone():
    model, queries = tiny_model("llama"), _queries()
    before = torch.random.get_rng_state()
    first = _tokens(_generate(model, queries, samples=6, seed=0))
    torch.manual_seed(99)
    assert _tokens(_generate(model, queries, samples=6, seed=0)) == first
    assert _tokens(_generate(model, queries, samples=6, seed=1)) != first
    torch.random.set_rng_state(before)


def test_rows_leaving_the_batch_do_not_change_the_others(monkeypatch):
    model, queries = tiny_model("llama"), _queries()
    leaving = _generate(model, queries, samples=20)
    monkeypatch.setitem(torch_engine._RHYTHMS, "cpu", torch_engine._Rhythm(1, 0.0))
    staying = _generate(model, queries, samples=20)
    assert _tokens(leaving) == _tokens(staying)
    lengths = {len(tokens) for tokens in _tokens(staying)}
    assert len(lengths) > 5


def test_keys_and_values_are_given_back_with_the_responses():
    model = tiny_model("llama")
    gc.collect()
    gc.disable()  # the collector sees few objects, and so seldom runs, however large these are
    try:
        _generate(model, _queries(), samples=3)
        assert not [held for held in gc.get_objects() if type(held) is DecodingSequences]
    finally:
        gc.enable()


def test_weights_are_live():
    model, queries = tiny_model("llama"), _queries()
    engine = TorchEngine(model, (EOS,))
    assert list(engine.weights()) == [name for name, _ in model.named_parameters()]
    donor = dict(tiny_model("llama", seed=1).named_parameters())
    sampling = Sampling(4, 1.0, LONGEST)
    old = _tokens(engine.generate(queries, sampling, torch.Generator().manual_seed(0)))
    with torch.no_grad():
        for name, weight in engine.weights().items():
            weight.copy_(donor[name])
    new = _tokens(engine.generate(queries, sampling, torch.Generator().manual_seed(0)))
    assert new != old
    assert new == _tokens(_generate(tiny_model("llama", seed=1), queries, samples=4))


def test_a_policy_of_nan_yields_tokens_of_the_vocabulary():
    model, queries = tiny_model("llama"), _queries()
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    for tokens in _tokens(_generate(model, queries, samples=3)):
        assert len(tokens) > 0
        assert all(0 <= token < VOCABULARY for token in tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_of_a_few_fixed_shapes_find_the_same(family, monkeypatch):
    model, queries = tiny_model(family), _queries()
    exact = _generate(model, queries, samples=10)
    shapes = set()
    run = torch_engine.Recording.run
    monkeypatch.setattr(
        torch_engine.Recording,
        "run",
        lambda self, work, key: (shapes.add(key), run(self, work, key)),
    )
    monkeypatch.setattr(
        torch_engine, "DecodingSequences", functools.partial(DecodingSequences, block=8)
    )
    monkeypatch.setitem(torch_engine._RHYTHMS, "cpu", torch_engine._Rhythm(4, 0.5))
    padded = _generate(model, queries, samples=10)
    assert _tokens(padded) == _tokens(exact)
    for one, other in zip(exact, padded, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a.log_mu, b.log_mu, atol=1e-4)
    assert {visible for _, visible in shapes} == {8, 16}
    assert len(shapes) <= 6
