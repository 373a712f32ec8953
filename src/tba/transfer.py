"""`tba transfer`: success against diversity of the attacks of runs, on one victim or several.

Each kept checkpoint of a run, and its initial model as step 0, writes attacks with the same random
numbers for every victim, so the attacks that reach two victims are the same; so is their diversity.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from tba.config import Config, RedteamTaskConfig
from tba.config.load import Tree, load_config, read_source
from tba.config.toml import literal
from tba.curves import Axis, Curve, Panel, Tell, columns_of, draw_panels, measure_runs, titles_of
from tba.errors import ConfigError
from tba.run.folder import RunFolder

OWN = "the run's own"
"""In the place of a victim's name."""
MEASURES = ("attack_success", "diversity", "reward")
"""What the table tells besides KL."""


@dataclass(frozen=True, slots=True)
class OnVictim:
    """The attacks of all runs on one victim."""

    victim: str
    """As it was named; the run's own where none was."""
    curves: tuple[Curve, ...]
    """One a run."""


def transfer_config(run: Path, victim: str | None, overrides: Sequence[str]) -> Config:
    """Return the settings of a run with a victim and others on top.

    Args:
        run: The run folder.
        victim: A model, asked as the run's own one, or a TOML file whose section task says more;
            None: the run's own one.
        overrides: Single settings.

    Raises:
        RunFolderError: The folder holds no run.
        ConfigError: It is no red-teaming, or has no sentence encoder.
    """
    bases: list[str | Config | Tree] = [RunFolder.open(run).config()]
    named = []
    if victim is not None and victim.endswith(".toml"):
        bases.append(_task_of(victim))
    elif victim is not None:
        named = [f"--task.victim={literal(victim)}"]
    config = load_config(bases, [*named, *overrides])
    if not isinstance(config.task, RedteamTaskConfig):
        raise ConfigError(
            f"{run} is a run of the task {config.task.kind}, but only attacks meet a victim: give "
            "runs with task.kind redteam"
        )
    if config.task.embedder is None:
        raise ConfigError(
            f"{run} has no sentence encoder to tell the diversity of its attacks: name one by "
            "--task.embedder"
        )
    return config


def _task_of(file: str) -> Tree:
    """Return the section task of a file; what else it says is of other runs.

    Raises:
        ConfigError: It cannot be read, or has none.
    """
    task = read_source(file).get("task")
    if not isinstance(task, dict):
        raise ConfigError(
            f"--victim {file} has no section [task]: write the victim's settings there, such as "
            "victim and victim_template"
        )
    return {"task": task}


def measure_transfer(
    runs: Sequence[Path],
    victims: Sequence[str],
    overrides: Sequence[str],
    *,
    samples: int,
    tell: Tell,
) -> list[OnVictim]:
    """Measure every kept checkpoint of runs on victims, as far as that is not done yet.

    Args:
        runs: Run folders.
        victims: As for `transfer_config`; without any, each run meets its own one.
        overrides: Settings on top of each run's own.
        samples: Attacks that a policy writes for each of `evaluation.queries`.
        tell: Told of each evaluation that begins.

    Raises:
        RunFolderError: A folder holds no run.
        ConfigError: A run is no red-teaming, or has no sentence encoder.
        UserError: A model cannot be used.
        AllExcludedError: Hardly any attack could be scored.
    """
    asked: list[str | None] = [*dict.fromkeys(victims)] or [None]
    configs = [[transfer_config(run, victim, overrides) for run in runs] for victim in asked]
    found = []
    for victim, own in zip(asked, configs, strict=True):
        tell(f"victim: {victim or OWN}")
        curves = measure_runs(runs, own, samples=samples, tell=tell)
        found.append(OnVictim(victim or OWN, tuple(curves)))
    return found


def results(found: Sequence[OnVictim]) -> list[dict[str, object]]:
    """Return everything in the form of JSON."""
    return [asdict(on_victim) for on_victim in found]


def table(found: Sequence[OnVictim]) -> Table:
    """Return one line a policy and victim."""
    lines = Table("victim", "run", *titles_of(MEASURES))
    for on_victim in found:
        for curve in on_victim.curves:
            for columns in columns_of(curve.points, MEASURES):
                lines.add_row(on_victim.victim, curve.label, *columns)
    return lines


def draw_picture(found: Sequence[OnVictim], path: Path) -> bool:
    """Draw success over diversity, a picture a victim and in it a curve a run.

    Returns:
        Whether matplotlib is here to do it.

    Raises:
        StorageError: The disk refused it.
    """
    x = Axis("diversity", "diversity: 1 - mean cosine of two attacks")
    y = Axis("attack_success", "share of attacks that succeed")
    return draw_panels([Panel(own.curves, x, y, title=own.victim) for own in found], path)
