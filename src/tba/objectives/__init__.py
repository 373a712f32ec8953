"""Objectives: pure functions from log-probabilities and rewards to a loss, by `objective.kind`."""

from tba.config.objectives import CustomObjectiveConfig, ObjectiveConfig
from tba.objectives.actor_critic import a3c, vtrace
from tba.objectives.base import INPUTS, Objective, ObjectiveOutput
from tba.objectives.custom import load_custom
from tba.objectives.f_trajectory_balance import f_tb
from tba.objectives.group_relative import dr_grpo, grpo, gspo
from tba.objectives.imitation import best_of_n, mle_smoothing, raft, rest, sft
from tba.objectives.importance import cispo, decoupled_ppo, icepop, m2po, tis
from tba.objectives.learned_z import dro, flowrl, tb_learned_z
from tba.objectives.mirror_descent import a_star_po, gvpo, kimi, opmd
from tba.objectives.policy_gradient import asymre, reinforce, rloo, rloo_proximal, topr
from tba.objectives.preference import best_and_worst, dpo, ipo, online_dpo
from tba.objectives.proximal import ppo, ppo_targets, vineppo
from tba.objectives.subtrajectory_balance import subtb
from tba.objectives.tapered_trajectory_balance import tb_tapered
from tba.objectives.trajectory_balance import trajectory_balance
from tba.objectives.trajectory_balance_prime import tb_prime

__all__ = [
    "INPUTS",
    "OBJECTIVES",
    "Objective",
    "ObjectiveOutput",
    "load_objective",
    "trajectory_balance",
]

PPO_TARGETS = ("advantage", "value_target", "value_old")

OBJECTIVES = {
    "tb": Objective(trajectory_balance),
    "tb_prime": Objective(tb_prime),
    "tb_tapered": Objective(tb_tapered),
    "tb_learned_z": Objective(tb_learned_z),
    "subtb": Objective(subtb),
    "f_tb": Objective(f_tb),
    "flowrl": Objective(flowrl),
    "dro": Objective(dro),
    "a_star_po": Objective(a_star_po),
    "kimi": Objective(kimi),
    "gvpo": Objective(gvpo),
    "opmd": Objective(opmd),
    "reinforce": Objective(reinforce),
    "rloo": Objective(rloo),
    "rloo_proximal": Objective(rloo_proximal),
    "topr": Objective(topr),
    "asymre": Objective(asymre),
    "grpo": Objective(grpo),
    "dr_grpo": Objective(dr_grpo),
    "gspo": Objective(gspo),
    "cispo": Objective(cispo),
    "tis": Objective(tis),
    "icepop": Objective(icepop),
    "m2po": Objective(m2po),
    "decoupled_ppo": Objective(decoupled_ppo),
    "ppo": Objective(ppo, prepare=ppo_targets, prepared=PPO_TARGETS),
    "vineppo": Objective(vineppo),
    "vtrace": Objective(vtrace),
    "a3c": Objective(a3c, sends_gradients=True),
    "online_dpo": Objective(online_dpo, choose=best_and_worst),
    "dpo": Objective(dpo),
    "ipo": Objective(ipo),
    "sft": Objective(sft),
    "best_of_n": Objective(best_of_n),
    "raft": Objective(raft),
    "rest": Objective(rest),
    "mle_smoothing": Objective(mle_smoothing),
}


def load_objective(section: ObjectiveConfig) -> Objective:
    """Return the objective that a section of the configuration chooses.

    Raises:
        ConfigError: A function of the user's own names an input that there is not, or a setting of
            it has no value.
        UserCodeError: It cannot be imported.
    """
    if isinstance(section, CustomObjectiveConfig):
        return load_custom(section)
    return OBJECTIVES[section.kind]
