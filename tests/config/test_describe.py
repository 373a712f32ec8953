from pathlib import Path

from pydantic import BaseModel

from tba.config import Config
from tba.config.describe import describe, sections
from tba.config.docs import PAGE, page
from tba.config.load import load_config


def settings_of(name: str) -> list:
    return [setting for setting in describe() if setting.name == name]


def leaves(config: BaseModel, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key in type(config).model_fields:
        value = getattr(config, key)
        is_section = isinstance(value, BaseModel)
        found |= leaves(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}"}
    return found


def test_every_setting_of_a_run_is_described_with_its_meaning():
    known = {setting.name for setting in describe()}
    unset_sections = {name.rpartition(".")[0] for name in known}
    assert leaves(load_config(["arithmetic"])) <= known | unset_sections
    assert all(setting.help and setting.type for setting in describe())


def test_each_top_level_section_has_a_meaning():
    assert set(sections()) == set(Config.model_fields) - {"seed", "device"}
    assert all(sections().values())


def test_bounds_choices_and_defaults_are_in_words():
    (steps,) = settings_of("trainer.steps")
    assert (steps.type, steps.default) == ("integer > 0", "1000")
    (staleness,) = settings_of("buffer.max_staleness")
    assert (staleness.type, staleness.default) == ("integer > 0 or none", "none")
    (mode,) = settings_of("sync.mode")
    assert (mode.choices, mode.default) == (("free", "barrier", "lockstep"), '"free"')


def test_a_union_tells_its_kinds_and_its_default_kind():
    (kind,) = settings_of("runtime.kind")
    assert (kind.choices, kind.default) == (("inline", "local"), '"local"')
    assert settings_of("task.kind")[0].default == "required"


def test_settings_of_every_kind_appear_once_and_without_a_condition():
    assert [setting.when for setting in settings_of("task.max_prompt_length")] == [""]


def test_settings_of_some_kinds_name_them():
    (start,) = settings_of("objective.beta.start")
    kinds, schedules = start.conditions
    assert schedules == ("objective.beta.kind", ("linear", "linear_then_cut"))
    assert kinds[0] == "objective.kind"
    assert {"tb", "rloo", "online_dpo"} < set(kinds[1])
    assert not {"grpo", "dr_grpo", "a_star_po", "kimi"} & set(kinds[1])
    assert start.when.endswith(" and objective.beta.kind = linear or linear_then_cut")
    assert {(s.when, s.default) for s in settings_of("task.train_file")} == {
        ("task.kind = gsm8k", "required"),
        ("task.kind = math", "required"),
        ("task.kind = custom", "none"),
        ("task.kind = preference", "required"),
        ("task.kind = redteam", "none"),
    }


def test_configuration_page_is_up_to_date():
    root = Path(__file__).parents[2]
    assert (root / PAGE).read_text() == page(), "run: python -m tba.config.docs"
