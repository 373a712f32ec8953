import numpy as np
import pytest

from plan.profiles import made_profile
from tba.errors import ConfigError
from tba.plan.profile import Cost, Measured, Profile, fit, lognormal


def test_a_linear_cost_is_found_again():
    true = Cost(0.5, 0.02, 0.003)
    rng = np.random.default_rng(0)
    work = rng.integers((50, 5), (500, 50), (20, 2)).tolist()  # tokens, longest
    measured = [Measured(true.seconds(*numbers), *numbers) for numbers in work]
    found = fit(measured[:5], measured[5:])
    assert (found.fixed_s, found.per_longest_s, found.per_token_s) == pytest.approx(
        (0.5, 0.02, 0.003)
    )


def test_no_part_of_a_cost_is_negative_and_the_base_has_its_mean():
    base = [Measured(1.0, 100, 10), Measured(1.2, 110, 10)]
    found = fit(base, [Measured(1.5, 50, 5), Measured(0.9, 10, 9)])
    assert min(found.fixed_s, found.per_longest_s, found.per_token_s) >= 0
    assert np.mean([found.seconds(m.tokens, m.longest) for m in base]) == pytest.approx(1.1)


def test_lognormal_lengths_have_the_moments_asked_for():
    lengths = lognormal(200, 80, 100_000, np.random.default_rng(0))
    assert lengths.mean() == pytest.approx(200, rel=0.01)
    assert lengths.std() == pytest.approx(80, rel=0.02)
    assert lengths.min() >= 1


def test_a_profile_is_read_as_it_was_written(tmp_path):
    made_profile().write(tmp_path / "new" / "profile.json")
    assert Profile.read(tmp_path / "new" / "profile.json") == made_profile()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(None, "cannot be read: No such file"), ("{", "holds no profile"), ("{}", "holds no profile")],
)
def test_what_is_no_profile_is_refused(tmp_path, text, sentence):
    file = tmp_path / "profile.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        Profile.read(file)


def test_settings_that_leave_the_costs_alone_may_change():
    changed = made_profile().changed(["--sync.sync_every=8", "--search.samples_per_query=16"])
    assert (changed.sync.sync_every, changed.search.samples_per_query) == (8, 16)


@pytest.mark.parametrize("override", ["--trainer.precision=bfloat16", "--objective.kind=grpo"])
def test_settings_on_which_costs_depend_need_a_new_profile(override):
    name = override.removeprefix("--").partition(".")[0]
    with pytest.raises(ConfigError, match=rf"measured with another {name}\..*without --profile"):
        made_profile().changed([override])
