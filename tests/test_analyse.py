"""`tba analyse`: every figure against a computation from the log and plain forward passes."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tba.analyse import Plan, Subject, analyse
from tba.analysis_report import ROWS
from tba.cli import app
from tba.config import TrajectoryBalanceConfig
from tba.errors import ConfigError, RunFolderError, UserError
from tba.gradients import DEFAULT, compare, sections_of
from tba.inputs import Inputs
from tba.objectives import OBJECTIVES
from tba.policy.adapters import load_trainable
from tba.policy.loading import load_policy
from tba.run.checkpoint import load_newest, load_step
from tba.run.folder import RunFolder
from tba.staleness import Bin, measure, parse_bins, samples_by_bin
from tba.update import BatchLoss, PolicyUpdate
from tiny_runs import rollouts, tiny_config, train

STEPS, BETA_STEPS = 12, {"kind": "linear", "start": 0.3, "end": 0.1}
SECTIONS = {
    "trainer": {"steps": STEPS},
    "sync": {"sync_every": 3},
    "buffer": {"on_policy_prob": 0.5},
    "checkpoint": {"every": 3, "keep": 10},
    "objective": {"kind": "tb", "beta": BETA_STEPS},
    "search": {"temperature": 0.9},
}
OLDEST = Bin("8-15", 8, 15)  # samples of the versions 0 and 3, the reference's among them
CPU = torch.device("cpu")


def run_of(folder: Path, **sections) -> Path:
    train(folder, tiny_config(folder, **sections))
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return run_of(tmp_path_factory.mktemp("run"), **SECTIONS)


@pytest.fixture(scope="module")
def unmoved(tmp_path_factory) -> Path:
    """Return a run whose policy stays the reference, to the last bit."""
    trainer = {"steps": 6, "learning_rate": 1e-30}
    objective = {"kind": "tb", "beta": {"kind": "constant", "value": 0.05}}
    folder = tmp_path_factory.mktemp("unmoved")
    return run_of(folder, **SECTIONS | {"trainer": trainer, "objective": objective})


@pytest.fixture(scope="module")
def whole(run):
    return analyse(run, Plan())


def subject_of(run: Path, *kinds: str, step: int | None = None) -> Subject:
    folder = RunFolder.open(run)
    found = load_newest(folder.checkpoints) if step is None else load_step(folder.checkpoints, step)
    config = folder.config()
    saved = [path.stem for path in found.path.glob("*.safetensors")]
    return Subject(folder, config, found, sections_of(kinds, config, logged=(), saved=saved))


def batch_of(subject: Subject, run: Path, bin_: Bin = OLDEST, *, queries=16, k=4, step=STEPS):
    (samples,) = samples_by_bin(subject.buffer, step, [bin_])
    return subject.draw(samples, queries=queries, samples_per_query=k)


def policy_of(run: Path, path: Path | None = None):
    config = RunFolder.open(run).config()
    path = path or load_newest(run / "checkpoints").policy
    return load_policy(path, config.model, device=CPU, dtype=torch.float32)


def naive(policy, prompt, tokens, temperature=0.9) -> torch.Tensor:
    """Log-probabilities of a response by one plain forward pass, with gradient."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    log_probs = (policy.model(ids).logits[0] / temperature).log_softmax(-1)
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return log_probs[at, ids[0, len(prompt) :]]


def naive_rows(policy, batch) -> list[torch.Tensor]:
    return [
        naive(policy, batch.prompts[query], tokens)
        for query, tokens in zip(batch.query_of_row, batch.tokens, strict=True)
    ]


def flat_gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# --- which samples


def test_bins_are_those_of_the_metrics_and_empty_ones_are_named(whole, run):
    assert [report.bin for report in whole.bins] == ["2-3", "4-7", "8-15"]
    assert [(left.bin, left.samples) for left in whole.left_out] == [("0", 0), ("1", 0)]
    unique = {(r["query_id"], tuple(r["tokens"])): r["policy_version"] for r in rollouts(run)}
    ages = [STEPS - version for version in unique.values()]
    for report, (low, high) in zip(whole.bins, [(2, 3), (4, 7), (8, 15)], strict=True):
        assert report.samples == sum(low <= age <= high for age in ages)


def test_a_batch_has_logged_samples_of_its_bin_alone_and_is_drawn_again_the_same(run):
    subject = subject_of(run)
    batch = batch_of(subject, run)
    logged = {(tuple(r["prompt_ids"]), tuple(r["tokens"])): r for r in rollouts(run)}
    assert batch.index.shape == (16, 4)
    for row, tokens in enumerate(batch.tokens):
        prompt = batch.prompts[batch.query_of_row[row]]
        found = logged[tuple(prompt.tolist()), tuple(tokens.tolist())]
        assert 8 <= STEPS - found["policy_version"] <= 15
        assert batch.policy_version[row] == found["policy_version"]
        assert batch.reward[row] == pytest.approx(found["reward"])
        np.testing.assert_allclose(batch.log_mu[row], found["log_mu"])
        np.testing.assert_allclose(batch.log_ref[row], found["log_ref"])
    again = batch_of(subject_of(run), run)
    assert [t.tolist() for t in again.tokens] == [t.tolist() for t in batch.tokens]
    assert len({prompt.tobytes() for prompt in batch.prompts}) == 16


def test_samples_repeat_only_where_there_are_too_few_and_each_occurs(run):
    subject = subject_of(run)
    for k in (2, 4, 12):
        batch = batch_of(subject, run, k=k)
        (samples,) = samples_by_bin(subject.buffer, STEPS, [OLDEST])
        for query, row in enumerate(batch.index):
            number = subject.buffer.field("query", batch.slots[row[:1]])[0]
            assert len(set(row)) == min(k, len(samples.slots[number])) >= 2, query


def test_a_query_with_one_sample_of_the_bin_is_not_drawn(run):
    subject = subject_of(run)
    (samples,) = samples_by_bin(subject.buffer, STEPS, [OLDEST])
    number, slots = next(iter(samples.slots.items()))
    samples.slots[number] = slots[:1]
    assert number not in samples.drawable()
    assert len(samples.drawable()) == len(samples.slots) - 1


def test_an_earlier_checkpoint_sees_the_buffer_of_its_time(run):
    early = analyse(run, Plan(objectives=("tb",), checkpoint=6))
    assert early.step == 6
    subject = subject_of(run, step=6)
    newest = subject.buffer.field("policy_version", np.arange(len(subject.buffer))).max()
    assert newest == 3  # version 6 is searched only after its checkpoint
    assert sum(report.samples for report in early.bins) == len(subject.buffer)


# --- what the samples say


def test_each_figure_of_the_samples_is_that_of_a_naive_computation(run, whole):
    subject, policy = subject_of(run), policy_of(run)
    batch = batch_of(subject, run)
    with torch.no_grad():
        log_pi = [row.double().numpy() for row in naive_rows(policy, batch)]
    beta = 0.1 + 0.2 * (1 - STEPS / STEPS)  # at the last step the line has reached its end
    figures = {name: [] for name in ("abs", "k1", "k3", "ess", "clipped", "outside", "log_z")}
    for rows in batch.index:
        rho = [log_pi[r] - batch.log_mu[r].astype(float) for r in rows]  # logarithms
        flat = np.concatenate(rho)
        advantage = batch.reward[rows] - batch.reward[rows].mean()
        sign = np.concatenate([np.full(len(x), a) for x, a in zip(rho, advantage, strict=True)])
        ratio = np.exp(flat)
        weight = np.exp([x.sum() for x in rho])
        figures["abs"].append(np.abs(flat).mean())
        figures["k1"].append(np.mean([-x.sum() for x in rho]))
        figures["k3"].append(np.mean([(np.exp(x) - 1 - x).sum() for x in rho]))
        figures["ess"].append(weight.sum() ** 2 / (len(rows) * (weight**2).sum()))
        clipped = ((ratio > 1.2) & (sign > 0)) | ((ratio < 0.8) & (sign < 0))
        figures["clipped"].append(clipped.mean())
        figures["outside"].append(((ratio > 1.2) | (ratio < 0.8)).mean())
        residuals = [
            batch.log_ref[r].astype(float).sum() - log_pi[r].sum() + batch.reward[r] / beta
            for r in rows
        ]
        figures["log_z"].append(np.mean(residuals))
    found = whole.bins[-1]
    assert whole.beta == pytest.approx(beta)
    names = "log_prob_mismatch kl_k1 kl_k3 effective_sample_share clipped_share outside_share log_z"
    for name, values in zip(names.split(), figures.values(), strict=True):
        assert getattr(found, name) == pytest.approx(np.mean(values), rel=1e-4, abs=1e-5), name
    assert found.kl_k3 > 0
    assert 0 < found.clipped_share < found.outside_share < 1


def test_log_z_of_the_reference_is_over_all_its_logged_responses(run, whole):
    subject = subject_of(run)
    batch = batch_of(subject, run)
    by_prompt: dict[tuple[int, ...], list[float]] = {}
    for row in rollouts(run):
        if row["policy_version"] == 0:
            by_prompt.setdefault(tuple(row["prompt_ids"]), []).append(row["reward"] / whole.beta)
    known = [by_prompt.get(tuple(prompt.tolist())) for prompt in batch.prompts]
    direct = [math.log(np.mean(np.exp(scaled))) for scaled in known if scaled]
    found = whole.bins[-1]
    assert 0 < len(direct) < 16
    assert found.reference_queries == len(direct)
    assert found.log_z_reference == pytest.approx(np.mean(direct))
    log_z = measured(subject, run, batch)["log_z"][[scaled is not None for scaled in known]]
    assert found.log_z_difference == pytest.approx(np.mean(log_z - np.array(direct)))


def measured(subject: Subject, run: Path, batch, budget: int = 128) -> dict[str, np.ndarray]:
    config = RunFolder.open(run).config()
    policy = policy_of(run)
    inputs = Inputs(policy.model, OBJECTIVES["tb"], config, policy.eos_ids)
    weight = subject.reference_weight
    return measure(
        inputs, batch, beta=subject.beta, reference_weight=weight, micro_batch_tokens=budget
    )


def test_log_z_is_of_the_runs_own_posterior(tmp_path):
    weight = {"kind": "linear", "start": 1.0, "end": 0.5}
    objective = SECTIONS["objective"] | {"reference_weight": weight}
    run = run_of(tmp_path, **SECTIONS | {"objective": objective})
    found, subject = analyse(run, Plan(objectives=("tb",))), subject_of(run)
    assert found.reference_weight == subject.reference_weight == 0.5
    batch = batch_of(subject, run)
    assert found.bins[-1].log_z == pytest.approx(measured(subject, run, batch)["log_z"].mean())
    subject.reference_weight = 1.0
    assert found.bins[-1].log_z != pytest.approx(measured(subject, run, batch)["log_z"].mean())


def test_figures_do_not_depend_on_the_micro_batches(run):
    subject = subject_of(run)
    batch = batch_of(subject, run)
    small, large = (measured(subject, run, batch, budget) for budget in (30, 100_000))
    for name, values in small.items():
        np.testing.assert_allclose(values, large[name], rtol=1e-4, atol=1e-5)


def test_a_policy_that_never_moved_is_where_it_sampled(unmoved):
    for report in analyse(unmoved, Plan(objectives=("tb",))).bins:
        assert report.log_prob_mismatch == pytest.approx(0, abs=1e-5)
        assert report.kl_k1 == pytest.approx(0, abs=1e-5)
        assert report.kl_k3 == pytest.approx(0, abs=1e-5)
        assert report.effective_sample_share == pytest.approx(1)
        assert report.clipped_share == report.outside_share == 0


def test_rows_of_another_reference_are_scored_anew(tmp_path):
    sync = {"sync_every": 3, "reference_reset_every": 4}
    run = run_of(tmp_path, **SECTIONS | {"sync": sync})
    subject = subject_of(run)
    batch = batch_of(subject, run)
    assert (batch.reference_version == 12).all()
    reference = policy_of(run)  # step 12 is one at which the reference became the policy
    for row, expected in zip(batch.log_ref, naive_rows(reference, batch), strict=True):
        np.testing.assert_allclose(row, expected.detach().numpy(), atol=1e-4)
    found = analyse(run, Plan(objectives=("tb",))).bins[-1]
    assert (found.reference_queries, found.log_z_reference) == (0, None)


# --- what objectives say


def test_loss_and_gradient_of_tb_are_those_of_equation_5(run, whole):
    policy = policy_of(run)
    batch = batch_of(subject_of(run), run)
    log_pi = torch.stack([row.sum() for row in naive_rows(policy, batch)])
    log_ref = torch.tensor([float(row.sum()) for row in batch.log_ref])
    index, beta = torch.from_numpy(batch.index), whole.beta
    scaled = torch.from_numpy(batch.reward) / beta
    residual = (log_pi - log_ref - scaled)[index]
    log_z = -residual.detach().mean(1, keepdim=True)  # (4)
    loss = beta / 2 * (log_z + residual).square().mean()  # (5)
    loss.backward()
    found = whole.bins[-1]
    assert found.loss["tb"] == pytest.approx(loss.item(), rel=1e-4)
    norm = flat_gradient(policy.model).norm().item()
    assert found.grad_norm["tb"] == pytest.approx(norm, rel=1e-4)


def test_norm_is_that_of_the_trainers_next_step(run, whole):
    config = RunFolder.open(run).config()
    policy = policy_of(run)
    batch = batch_of(subject_of(run), run)
    metrics = PolicyUpdate(policy.model, config, policy.eos_ids).step(batch, STEPS).metrics
    assert whole.bins[-1].loss["tb"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert whole.bins[-1].grad_norm["tb"] == pytest.approx(metrics["grad_norm"], rel=1e-5)


def test_clipped_share_is_the_one_that_dr_grpo_reports(run, whole):
    config = RunFolder.open(run).config()
    policy = policy_of(run)
    section = sections_of(["dr_grpo"], config, logged=(), saved=())["dr_grpo"]
    loss = BatchLoss(policy.model, config.model_copy(update={"objective": section}))
    metrics = loss.backward(batch_of(subject_of(run), run), STEPS)
    assert float(metrics["clipped_share"]) == pytest.approx(whole.bins[-1].clipped_share, abs=1e-5)


def test_cosines_are_those_of_the_gradients_themselves(run, whole):
    config, policy = RunFolder.open(run).config(), policy_of(run)
    batch = batch_of(subject_of(run), run)
    gradients = {}
    for kind, section in sections_of(None, config, logged=(), saved=()).items():
        policy.model.zero_grad()
        BatchLoss(policy.model, config.model_copy(update={"objective": section})).backward(
            batch, STEPS
        )
        gradients[kind] = flat_gradient(policy.model).double()
    assert whole.objectives == tuple(gradients) == DEFAULT
    for a, row in zip(gradients.values(), whole.bins[-1].cosine, strict=True):
        for b, found in zip(gradients.values(), row, strict=True):
            direct = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
            assert found == pytest.approx(direct, abs=1e-4)


def test_an_objective_goes_its_own_way_and_cosines_are_symmetric(whole):
    for report in whole.bins:
        cosine = np.array(report.cosine)
        np.testing.assert_allclose(np.diag(cosine), 1)
        np.testing.assert_array_equal(cosine, cosine.T)
        assert np.abs(cosine).max() <= 1 + 1e-9


def test_where_the_policy_sampled_itself_rloo_is_tb_times_k_over_k_minus_1(unmoved):
    found = analyse(unmoved, Plan(objectives=("tb", "rloo"), samples=3))
    assert len(found.bins) >= 2
    for report in found.bins:
        assert report.cosine[0][1] == pytest.approx(1, abs=1e-6)
        assert report.grad_norm["rloo"] == pytest.approx(report.grad_norm["tb"] * 3 / 2, rel=1e-4)


def test_where_the_policy_has_moved_they_differ(whole):
    tb, rloo = whole.objectives.index("tb"), whole.objectives.index("rloo")
    assert whole.bins[-1].cosine[tb][rloo] < 1 - 1e-4


def test_an_objective_without_gradient_has_no_direction(run):
    policy = policy_of(run)
    config = RunFolder.open(run).config()
    batch = batch_of(subject_of(run), run)
    batch.reward[:] = 1.0
    sections = sections_of(["online_dpo", "tb"], config, logged=(), saved=())
    losses = {
        kind: BatchLoss(policy.model, config.model_copy(update={"objective": section}))
        for kind, section in sections.items()
    }
    found = compare(losses, policy.model, batch, STEPS)
    assert found.grad_norm["online_dpo"] == found.loss["online_dpo"] == 0
    assert np.isnan(found.cosine[0]).all()
    assert found.cosine[1][1] == pytest.approx(1)


def test_the_runs_own_section_is_used_and_its_beta_is_that_of_the_step(run):
    config = RunFolder.open(run).config()
    sections = sections_of(None, config, logged=(), saved=())
    assert sections["tb"] == config.objective != TrajectoryBalanceConfig()
    assert sections["rloo"].beta.value == 0.05
    assert analyse(run, Plan(objectives=("tb",), checkpoint=3)).beta == pytest.approx(0.25)


COMPUTABLE = [
    kind
    for kind, objective in OBJECTIVES.items()
    if not {"value", "log_z", "log_old", "prefix_reward", "step_advantage", "log_z_star"}
    & {*objective.inputs(), *objective.inputs_of_preparation()}
]


def test_every_objective_that_needs_nothing_more_can_be_compared(run):
    found = analyse(run, Plan(objectives=tuple(COMPUTABLE), queries=3))
    assert found.objectives == tuple(COMPUTABLE)
    assert len(COMPUTABLE) > 20
    for report in found.bins:
        assert all(math.isfinite(value) for value in report.loss.values())
        assert all(math.isfinite(value) for value in report.grad_norm.values())


@pytest.mark.parametrize("kind", ["ppo", "tb_learned_z", "decoupled_ppo", "subtb"])
def test_a_run_of_an_objective_with_more_to_it_can_be_compared_by_it(tmp_path, kind):
    run = run_of(tmp_path, **SECTIONS | {"objective": {"kind": kind}, "trainer": {"steps": 5}})
    found = analyse(run, Plan(objectives=(kind, "tb"), queries=4))
    assert found.objective == kind
    assert all(math.isfinite(report.grad_norm[kind]) for report in found.bins)
    own = RunFolder.open(run).config().objective
    folder, newest = RunFolder.open(run), load_newest(run / "checkpoints")
    loss = Subject(folder, folder.config(), newest, {kind: own})._losses[kind]
    for name, weights in loss.beside_the_policy().items():
        saved = newest.path / f"{name}.safetensors"
        assert saved.exists()
        assert any(weight.any() for weight in weights.values()), "restored, not new"


# --- what is refused


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("grpoo", "which is no objective (did you mean grpo?): see docs/objectives.md"),
        ("custom", "--objectives names custom, which has no default settings"),
        ("subtb", "needs log_ref_stop and prefix_reward, but this run of tb did not log that"),
        ("vineppo", "needs step_advantage, but this run of tb did not log that"),
        ("a_star_po", "needs log_z_star, but this run of tb did not log that"),
        ("ppo", "needs a learned value, but the checkpoint of this run of tb has none"),
        ("tb_learned_z", "needs a learned log_z, but the checkpoint of this run of tb has none"),
        ("decoupled_ppo", "needs an anchor pi_old, but the checkpoint of this run of tb has none"),
    ],
)
def test_an_objective_that_cannot_be_computed_is_refused_by_name(run, tmp_path, kind, sentence):
    result = command(run, tmp_path, "--objectives", f"tb,{kind}")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"tba: --objectives names {kind}, ")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_heads_of_another_objective_are_not_taken_for_ones_own(run):
    config = RunFolder.open(run).config()
    with pytest.raises(ConfigError, match="dro, which needs a learned log_z"):
        sections_of(["dro"], config, logged=(), saved=("heads",))


@pytest.mark.parametrize("text", ["", "a", "1-", "0,,1", "-1", "0;1"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ConfigError, match="is no range: write numbers and ranges such as 0,1,2-3"):
        parse_bins(text)


@pytest.mark.parametrize("text", ["1,0", "0-3,2", "3-1", "0,0", "2+,9"])
def test_bins_that_overlap_or_descend_are_refused(text):
    with pytest.raises(ConfigError, match="bins must ascend and not overlap"):
        parse_bins(text)


def test_bins_are_read_as_written():
    assert parse_bins("0,2-3,8+") == [Bin("0", 0, 0), Bin("2-3", 2, 3), Bin("8+", 8, None)]


def test_bins_without_two_samples_of_a_query_are_refused(run):
    with pytest.raises(UserError, match="no query with two samples of one range of staleness"):
        analyse(run, Plan(bins=tuple(parse_bins("0,1,99+"))))


def test_a_run_without_checkpoint_or_with_others_is_told_so(run, tmp_path):
    with pytest.raises(RunFolderError, match=r"no checkpoint of step 5: it has those of 3, 6, 9"):
        analyse(run, Plan(checkpoint=5))
    with RunFolder.create(tmp_path / "new", tiny_config(tmp_path)):
        pass
    with pytest.raises(RunFolderError, match="has no checkpoint yet"):
        analyse(tmp_path / "new", Plan())
    with pytest.raises(RunFolderError, match="is not a run folder"):
        analyse(tmp_path, Plan())


def test_a_checkpoint_that_goes_meanwhile_is_told_so(run, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)

    def gone(*arguments, checkpoint, **options):
        shutil.rmtree(checkpoint)
        return load_trainable(*arguments, checkpoint=checkpoint, **options)

    monkeypatch.setattr("tba.analyse.load_trainable", gone)
    with pytest.raises(RunFolderError, match="was superseded while it was read: try again"):
        analyse(copy, Plan())


# --- the command


def command(run: Path, folder: Path, *arguments: str):
    return CliRunner().invoke(app, ["analyse", str(run), "--out", str(folder / "out"), *arguments])


def content(folder: Path) -> dict[Path, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_live_run_is_left_as_it_is(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    with RunFolder.resume(copy) as folder:  # holds the lock, as a run does
        with folder.rollouts.open("ab") as log:
            log.write(b"half a batch")
        before = content(copy)
        result = command(copy, tmp_path, "--objectives", "tb", "--queries", "2")
        assert result.exit_code == 0, result.output
        assert content(copy) == before


def test_command_prints_and_writes_everything(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    arguments = ["--bins", "0,4-7,8+", "--queries", "3", "--objectives", "tb,grpo"]
    result = CliRunner().invoke(app, ["analyse", str(tmp_path / "run"), *arguments])
    assert result.exit_code == 0, result.output
    assert not set("│┃━┏└") & set(result.stdout), "plain when nobody is there"
    words = " ".join(result.stdout.split())
    assert all(title in words for title, _ in ROWS)
    assert "cosine of gradients, staleness 8+" in words
    assert "staleness 0 is left out: the buffer has no such samples" in words
    written = tmp_path / "run" / "analysis"
    assert result.stdout.endswith(f"everything is in {written}\n")
    told = json.loads((written / "analysis.json").read_text())
    direct = analyse(
        tmp_path / "run", Plan(("tb", "grpo"), tuple(parse_bins("0,4-7,8+")), queries=3)
    )
    assert told == json.loads(direct.to_json())
    assert [report["queries"] for report in told["bins"]] == [3, 3]
    assert (written / "analysis.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_line_says_so(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = command(run, tmp_path, "--objectives", "tb", "--queries", "2")
    assert result.exit_code == 0, result.output
    assert "no picture: matplotlib is missing (the extra report)" in result.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["analysis.json"]


def test_an_unwritable_place_is_one_sentence(run, tmp_path):
    (tmp_path / "out").write_text("a file")
    result = command(run, tmp_path, "--objectives", "tb", "--queries", "2")
    assert result.exit_code == 1
    assert "could not be written" in result.stderr


def test_numbers_that_are_not_finite_are_null_in_the_file(whole):
    bad = whole.bins[0].__class__(
        **{name: getattr(whole.bins[0], name) for name in whole.bins[0].__slots__}
        | {"log_z": math.nan, "cosine": ((math.nan, 1.0),)}
    )
    told = json.loads(type(whole)(**fields(whole) | {"bins": (bad,)}).to_json())
    assert told["bins"][0]["log_z"] is None
    assert told["bins"][0]["cosine"] == [[None, 1.0]]


def fields(record) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__slots__}


def test_the_page_lists_exactly_what_the_file_holds(whole):
    page = (Path(__file__).parents[1] / "docs/analyse.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([\w.]+)` \|", page, flags=re.MULTILINE))
    told = json.loads(whole.to_json())
    nested = {f"{name}.{key}" for name in ("bins", "left_out") for row in told[name] for key in row}
    assert listed == set(told) | nested
