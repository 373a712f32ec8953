import json

from plan.profiles import made_config, made_profile
from tba.plan.planning import plan
from tba.plan.report import COLUMNS, answers, draw_picture, plan_table
from tba.plan.simulation import Setup

SETUP = Setup(searchers=1, warm_up=20, steps=100)


def test_enough_searchers_find_what_the_trainer_draws():
    # the trainer draws 4 batches a second, a searcher finds 1: four are enough, to within an edge
    made = plan(made_profile(), made_config(), SETUP, [1, 2, 16])
    assert made.enough in (4, 5)
    assert [point.searchers for point in made.points] == [1, 2, 16]
    assert made.points[0].reuse > 3.5
    assert made.points[2].reuse < 0.3


def test_lockstep_is_quickest_when_one_batch_each_is_a_round():
    config = made_config("--sync.mode=lockstep", "--sync.sync_every=8")
    made = plan(made_profile(), config, SETUP, [1, 2, 4, 8, 16])
    assert made.quickest == 8  # a round needs 8 batches
    assert made.enough is None  # the trainer waits for each round


def test_searchers_that_drown_the_trainer_are_marked_and_never_enough():
    made = plan(made_profile(add_s=0.002), made_config(), SETUP, [4, 256])
    assert [point.is_drowned for point in made.points] == [False, True]
    assert any("more arrives than" in sentence for sentence in answers(made))
    assert plan_table(made).row_count == 2


def test_nothing_is_said_of_an_m_branch_that_draws_nothing(tmp_path):
    made = plan(made_profile(), made_config("--buffer.on_policy_prob=0"), SETUP, [1, 4])
    assert made.freshest is None
    assert [point.staleness_recent for point in made.points] == [None, None]
    assert not any("m branch" in sentence for sentence in answers(made))
    assert list(plan_table(made).columns[list(COLUMNS).index("m branch")].cells) == ["-", "-"]
    assert draw_picture(made, tmp_path / "plan.png")


def test_a_plan_is_written_and_drawn(tmp_path):
    made = plan(made_profile(), made_config(), SETUP, [1, 8])
    made.write(tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["enough"] == made.enough
    assert sum(written["points"][0]["staleness_histogram"].values()) == 100 * 16
    assert draw_picture(made, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
