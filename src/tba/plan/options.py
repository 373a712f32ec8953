"""What the user says on the command line, turned into what a plan is asked for. Free of torch."""

from collections.abc import Sequence
from pathlib import Path

from tba.config import Config
from tba.config.load import load_config
from tba.errors import ConfigError
from tba.plan.profile import Profile

HERE = "1,2,3,4,5,6,7,8"
APART = "1,2,4,8,16,32,64,128,256,512,1024"
MOST_SEARCHERS = 4_096
_LONGEST = 1_000_000


def searcher_counts(text: str | None, *, apart: bool) -> list[int]:
    """Return the numbers of searchers to simulate.

    Raises:
        ConfigError: Some are no such numbers.
    """
    words = (text or (APART if apart else HERE)).split(",")
    counts = [int(word) if word.strip().isdecimal() else 0 for word in words]
    if not all(1 <= count <= MOST_SEARCHERS for count in counts):
        raise ConfigError(
            f"--searchers is {text}, expected numbers from 1 to {MOST_SEARCHERS:,}, such as 1,2,4"
        )
    return counts


def length_shape(text: str | None) -> tuple[float, float] | None:
    """Return mean and standard deviation of response lengths; None: as measured.

    Raises:
        ConfigError: They are no two positive numbers of tokens.
    """
    if text is None:
        return None
    try:
        mean, deviation = (float(word) for word in text.split(","))
    except ValueError:
        mean = deviation = 0.0
    if not (1 <= mean <= _LONGEST and 0 < deviation <= _LONGEST):
        raise ConfigError(
            f"--lengths is {text}, expected a mean of at least 1 and a deviation above 0, both of "
            f"at most {_LONGEST:,} tokens, such as 200,80"
        )
    return mean, deviation


def planned(
    sources: Sequence[str], overrides: Sequence[str], file: Path | None
) -> tuple[Config, Profile | None]:
    """Return the run that is planned, and its profile where one was given.

    Raises:
        ConfigError: Neither or both are named, or something in them is wrong.
    """
    if bool(sources) == (file is not None):
        given = "both were given" if sources else "neither was given"
        raise ConfigError(
            f"plan takes either a run, named as for train, or a --profile, and {given} (single "
            "settings may go with either)"
        )
    if file is None:
        return load_config(sources, overrides), None
    profile = Profile.read(file)
    return profile.changed(overrides), profile
