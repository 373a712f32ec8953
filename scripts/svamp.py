"""Turns SVAMP's JSON lines into files that `tba sft` and task `math` read.

    python scripts/svamp.py svamp_test.jsonl DIR

SVAMP (arkilpatel/SVAMP, MIT) has 1,000 one-step word problems. A row becomes

    problem      the story and its question
    answer       the number
    completion   the equation worked out, such as " 8 - 3 = 5"

DIR/train.jsonl has 800 of them, DIR/test.jsonl the other 200, split at random, always alike.
"""

import argparse
import json
import random
import re
from decimal import Decimal
from pathlib import Path

HELD_OUT = 200
SEED = 0


def main() -> None:
    """Write the two files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    rows = [row(json.loads(line)) for line in arguments.source.read_text().splitlines()]
    random.Random(SEED).shuffle(rows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[HELD_OUT:]), ("test", rows[:HELD_OUT])):
        path = arguments.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in part))
        print(f"{path}: {len(part)} problems")


def row(problem: dict[str, str | float]) -> dict[str, str]:
    """Return a problem as this project's tasks have it."""
    story, question = (str(problem[name]).strip().rstrip(".,") for name in ("Body", "Question"))
    equation = re.sub(r"[\d.]+", lambda number: plain(number[0]), str(problem["Equation"]))
    inner = equation.strip().removeprefix("(").removesuffix(")").strip()
    answer = plain(str(problem["Answer"]))
    return {
        "problem": f"{story}. {question if question.endswith('?') else question + '?'}",
        "answer": answer,
        "completion": f" {re.sub(r' +', ' ', inner)} = {answer}",
    }


def plain(number: str) -> str:
    """Write a number without needless zeros: 8 for 8.0, 7.5 for 7.50."""
    value = Decimal(number)
    return f"{value.normalize():f}"


if __name__ == "__main__":
    main()
