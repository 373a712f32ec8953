"""Trajectory balance and its VarGrad form agree with torchgfn's losses."""

from types import SimpleNamespace

import pytest
import torch

from objectives.squared_batch import BETA, batch, value_and_gradients

gflownet = pytest.importorskip("gfn.gflownet", reason="torchgfn is not installed")


def _theirs(base, inputs, log_z=None):
    """Their loss of one query: backward probabilities are 1, log R = log ref + r / beta."""

    class Given(base):
        def get_pfs_and_pbs(self, trajectories, recalculate_all_logprobs=True):
            log_pf = inputs["log_pi"].where(inputs["mask"], 0.0)[0]
            log_pf = log_pf.T  # [sample, token] -> [token, sample]
            return log_pf, torch.zeros_like(log_pf)

    more = {} if log_z is None else {"logZ": log_z}
    model = Given(pf=torch.nn.Identity(), pb=None, constant_pb=True, **more)
    reward = inputs["log_ref"][0].sum(-1) + inputs["reward"][0] / BETA
    trajectories = SimpleNamespace(log_rewards=reward, states=SimpleNamespace(conditions=None))
    raw = model.loss(None, trajectories)
    half = model.loss_fn(torch.tensor(2.0)).item() / 4  # 1/2 where they halve the square
    return BETA / 2 * raw / half


def test_tb_learned_z_is_their_trajectory_balance():
    inputs = batch(queries=1)
    output, gradients = value_and_gradients("tb_learned_z", inputs)
    log_z = torch.nn.Parameter(inputs["log_z"].detach().clone())
    theirs = _theirs(gflownet.TBGFlowNet, inputs, log_z)
    torch.testing.assert_close(output.loss, theirs, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(theirs, (inputs["log_pi"], log_z))
    torch.testing.assert_close(gradients["log_pi"], found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients["log_z"], found[1], rtol=1e-5, atol=1e-5)


def test_tb_is_their_log_partition_variance():
    inputs = batch(queries=1)
    output, gradients = value_and_gradients("tb", inputs)
    theirs = _theirs(gflownet.LogPartitionVarianceGFlowNet, inputs)
    torch.testing.assert_close(output.loss, theirs, rtol=1e-5, atol=1e-5)
    (found,) = torch.autograd.grad(theirs, inputs["log_pi"])
    torch.testing.assert_close(gradients["log_pi"], found, rtol=1e-5, atol=1e-5)
