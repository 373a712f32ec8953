"""The paper's comparison on mathematics, at the size of two cores: SVAMP with SmolLM2-135M.

    python scripts/svamp.py svamp_test.jsonl data/svamp
    python -m benchmarks.twin_math --model models/smollm2 --data data/svamp --out build/twin_math

One supervised fine-tuning (`tba sft`, made once) is the policy with which every method begins, and
its reference. Then each trains for `--seconds`, seed by seed, on batches of 8 queries with 8
responses, of which a search batch has as many:

    tba           trajectory balance, free, replay: the recipe `svamp-smollm2`
    dr-grpo, ppo  free, from a queue: the newest unused responses, each once
    rloo          as these, the proximal variant for data that is a step or two old
    online-dpo    as these; the model sees the best and the worst of the 8
    vineppo       lockstep, both cores in each phase: its value estimates are those of the policy
                  that is trained; the steps of an answer are its equation and its result

Each method trains at each of `--rates`, with every seed, and the table has all of them: two runs at
one rate differ by as much as two rates do, so one run each would choose a rate by chance.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tba
from benchmarks.arguments import keep_to, learning_rates
from benchmarks.entrants import Budget, Entrant, by_method, parser, results, spread, start
from tba.api import let_idle_threads_sleep
from tba.runtimes.resources import available_cores

RECIPE = "svamp-smollm2"
COMMON = (
    "--search.queries_per_batch=8",
    "--search.samples_per_query=8",
    "--buffer.initial_samples=128",
)
QUEUE = (
    "--buffer.on_policy_prob=1.0",
    "--buffer.recent_versions=1",
    "--buffer.max_reuse=1",
)
IN_TURN = (
    "--sync.mode=lockstep",
    f"--runtime.trainer_threads={available_cores()}",
    f"--runtime.searcher_threads={available_cores()}",
)
METHODS = (
    Entrant("tba", ()),
    Entrant("dr-grpo", ('--objective={kind = "dr_grpo"}', *QUEUE)),
    Entrant("rloo", ('--objective={kind = "rloo_proximal"}', *QUEUE)),
    Entrant("ppo", ('--objective={kind = "ppo"}', *QUEUE)),
    Entrant("online-dpo", ('--objective={kind = "online_dpo"}', *QUEUE)),
    Entrant("vineppo", ('--objective={kind = "vineppo", step_separator = "="}', *QUEUE, *IN_TURN)),
)
SAMPLES = 4
"""Responses sampled for each query of an evaluation."""
SFT = (
    "--trainer.steps=120",
    "--trainer.learning_rate=2e-5",
    "--trainer.queries_per_batch=16",
    '--trainer.learning_rate_schedule={kind = "cosine", warmup_steps = 10}',
)


def main() -> None:
    """Fine-tune, train every method, print the table."""
    known = parser(__doc__, "twin_math", [method.name for method in METHODS])
    known.add_argument("--data", type=Path, required=True)
    known.add_argument("--seconds", type=float, default=180.0)
    known.add_argument("--rates", type=learning_rates, default=["1e-5"])
    arguments = known.parse_args()
    keep_to(known, arguments, "model", "data", "seconds")
    let_idle_threads_sleep()
    out: Path = arguments.out
    files = [f"--task.{part}_file={arguments.data / part}.jsonl" for part in ("train", "test")]
    policy = fine_tuned(arguments.model, files, out)
    common = [*COMMON, *files, f"--model.model_name_or_path={policy}"]
    begin = out / "start.json"
    if not begin.is_file():
        begin.write_text(json.dumps(start([RECIPE], common, SAMPLES)))
    wanted = [method for method in METHODS if method.name in arguments.methods]
    found = results(
        [RECIPE],
        [method.at(rate) for rate in arguments.rates for method in wanted],
        out,
        common=common,
        budget=Budget(seconds=arguments.seconds),
        seeds=range(arguments.seeds),
        samples=SAMPLES,
    )
    print(table(json.loads(begin.read_text()), found))


def fine_tuned(model: Path, files: Sequence[str], out: Path) -> Path:
    """Return the folder of the policy that all begin with, made by `tba sft` once."""
    run = out / "sft"
    if not (run / "summary.json").is_file():
        settings = dict(word.removeprefix("--").split("=", 1) for word in [*files, *SFT])
        settings["model.model_name_or_path"] = str(model)
        tba.sft(RECIPE, run_dir=run, clean=run.exists(), **settings)
    return max((run / "checkpoints").glob("step-*")) / "policy"


def sampled_pass_at_1(result: dict[str, Any]) -> float:
    """Return the share of sampled responses that are right."""
    return next(iter(result["report"]["pass_at"].values()))


def table(begin: dict[str, Any], found: Sequence[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    rows = [
        "| method | rate | seeds | steps | answers searched | staleness | sampled pass@1 "
        "| greedy pass@1 | KL, nats |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| (start) | | | | | | {sampled_pass_at_1({'report': begin}):.3f} "
        f"| {begin['greedy_pass_at_1']:.3f} | 0 |",
    ]
    for name, own in by_method(found):
        method, _, rate = name.rpartition("-at-")
        cells = [
            spread(own, lambda result: result["steps"]),
            spread(own, lambda result: result["searched"]),
            spread(own, lambda result: result["staleness"]),
            spread(own, sampled_pass_at_1),
            spread(own, lambda result: result["report"]["greedy_pass_at_1"]),
            spread(own, lambda result: result["report"]["kl"]),
        ]
        rows.append(f"| {method} | {rate} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
