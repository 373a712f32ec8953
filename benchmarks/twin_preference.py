r"""The paper's preference tuning at the size of one core: instructions with SmolLM2-135M.

    python scripts/smollm2.py models/smollm2
    python -m benchmarks.twin_preference --model models/smollm2 --data DIR --embedder MINILM \
        --out build/twin_preference

DIR has self-instruct's JSON lines, MINILM is all-MiniLM-L6-v2. A gold judge (`gold_judge.py`)
orders completions of the initial policy; a proxy reward model learns the order; every method is
trained with the proxy and measured by the judge, with equal numbers of steps, of samples searched
and of samples a step, and with staleness from the barriers of `--sync.mode barrier`:

    tba         trajectory balance with replay as in the paper's TL;DR run: m = .5, softmax(reward);
                prompts are not asked twice, so what is replayed are older queries, all 4 of 4
    online-dpo, rloo (proximal), ppo    each sample once, in the newest round

Everything runs in one process on the cores that it is given, so that calls with different
`--methods`, `--staleness` or `--rates` can share `--out` side by side:

    taskset -c 0 python -m benchmarks.twin_preference ... --methods tba,rloo &
    taskset -c 1 python -m benchmarks.twin_preference ... --methods online-dpo,ppo

Each method trains at each of `--rates`, with every seed, as METHOD-at-RATE-STALENESS-SEED.
Staleness s comes of barriers every k = (2 s + 1) / 3 steps: 1, 2.5 and 14.5 on average by default,
on the m branch; replay is older, and the table tells what was measured. `--out` gets table.md,
pareto-STALENESS.png (mean over seeds) and pareto.json.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks import gold_judge, preference_data
from benchmarks.arguments import counts, keep_to, learning_rates
from benchmarks.entrants import (
    Budget,
    Entrant,
    Figure,
    by_method,
    parser,
    results,
    spread,
    start,
)
from tba import pareto
from tba.api import let_idle_threads_sleep
from tba.config.load import load_config
from tba.curves import Curve, Point, write
from tba.errors import UserError
from tba.eval import PolicyReport
from tba.run.durable import replace_file

JUDGE = f"{Path(gold_judge.__file__).resolve()}:judge"
CHECKPOINTS = 2
"""Policies of a run that are measured: half way and last."""
SAMPLES = 2
"""Responses sampled for each held-out prompt."""
COMMON = (
    "--task.kind=preference",
    "--task.chat=true",
    "--task.system_prompt=Answer in one short sentence.",
    "--task.scored_text={completion}",
    "--task.max_prompt_length=160",
    "--search.queries_per_batch=4",
    "--search.samples_per_query=4",
    "--search.temperature=0.7",
    "--search.max_completion_length=32",
    "--search.precision=bfloat16",
    "--buffer.initial_samples=160",
    "--trainer.queries_per_batch=4",
    "--trainer.samples_per_query=4",
    '--trainer.learning_rate_schedule={kind = "linear"}',
    "--trainer.precision=bfloat16",
    "--trainer.micro_batch_tokens=2048",
    "--runtime.kind=inline",
    "--sync.mode=barrier",
    "--evaluation.queries=64",
)
ONCE = (
    "--buffer.on_policy_prob=1.0",
    "--buffer.recent_versions=1",
    "--buffer.max_reuse=1",
)
REPLAY = ("--buffer.on_policy_prob=0.5", "--buffer.off_policy_sampling=softmax_reward")
PAPER_BETA = '{kind = "linear_then_cut", start = 1.0, end = 0.05, end_at = 0.5, cut_at = 0.125}'
METHODS = (
    Entrant("tba", (f'--objective={{kind = "tb", beta = {PAPER_BETA}}}', *REPLAY)),
    Entrant("online-dpo", ('--objective={kind = "online_dpo"}', *ONCE)),
    Entrant("rloo", ('--objective={kind = "rloo_proximal"}', *ONCE)),
    Entrant("ppo", ('--objective={kind = "ppo"}', *ONCE)),
)
FIGURES: dict[str, Figure] = {
    "measured": lambda result: result["staleness"],
    "gold win rate": lambda result: result["report"]["measured"]["win_rate_reference"],
    "gold reward": lambda result: result["report"]["measured"]["gold_reward"],
    "proxy reward": lambda result: result["report"]["measured"]["reward"],
    "KL, nats": lambda result: result["report"]["kl"],
    "perplexity": lambda result: result["report"]["perplexity"],
    "length": lambda result: result["report"]["mean_response_tokens"],
    "distinct-1": lambda result: result["report"]["measured"]["distinct_1"],
    "distinct-2": lambda result: result["report"]["measured"]["distinct_2"],
}
"""Columns of the table."""


def main() -> None:
    """Prepare, train every method at every staleness, write table and pictures."""
    known = parser(__doc__, "twin_preference", [method.name for method in METHODS])
    known.add_argument("--data", type=Path, required=True)
    known.add_argument("--embedder", type=Path, required=True)
    known.add_argument("--steps", type=int, default=40)
    known.add_argument("--staleness", type=counts, default=[1, 2, 15])
    known.add_argument("--rates", type=learning_rates, default=["3e-5"])
    arguments = known.parse_args()
    keep_to(known, arguments, "model", "data", "embedder", "steps")
    let_idle_threads_sleep()
    try:
        compare(arguments)
    except UserError as error:
        known.error(str(error))


def compare(arguments: argparse.Namespace) -> None:
    """Do what is missing of the comparison and tell what there is of it."""
    out: Path = arguments.out
    files = preference_data.Files(out)
    common = [*COMMON, f"--model.model_name_or_path={arguments.model}", *task_files(files)]
    proxied = [*common, f"--task.reward_model={files.proxy}", f"--task.judge={JUDGE}"]
    with preference_data.alone(out):
        preference_data.write_prompts(arguments.data, files)
        preference_data.write_pairs(load_config([], [*common, f'--task.reward=["{JUDGE}"]']), files)
        proxy = preference_data.train_proxy(arguments.embedder, files)
        begin = out / "start.json"
        if not begin.is_file():
            replace_file(begin, [json.dumps(start([], proxied, SAMPLES)).encode()])
    budget = Budget(steps=arguments.steps, checkpoints=CHECKPOINTS)
    wanted = entrants(arguments.methods, arguments.rates, arguments.staleness)
    seeds = range(arguments.seeds)
    results([], wanted, out, common=proxied, budget=budget, seeds=seeds, samples=SAMPLES)
    with preference_data.alone(out):
        found = finished(out)
        initial = json.loads(begin.read_text())
        page = f"{proxy_line(proxy)}\n\n{table(initial, found)}"
        (out / "table.md").write_text(page + "\n")
        print(page)
        picture(initial, found, out)


def finished(out: Path) -> list[dict[str, Any]]:
    """Return all results in a folder, of other calls too: by staleness, method, rate and seed."""
    order = [method.name for method in METHODS]
    found = [json.loads(file.read_text()) for file in out.glob("*-at-*-*-*.json")]

    def place(result: dict[str, Any]) -> tuple[int, int, float, int]:
        method, rate, staleness = parts(result["method"])
        return staleness, order.index(method), float(rate), result["seed"]

    return sorted(found, key=place)


def parts(name: str) -> tuple[str, str, int]:
    """Return the method, the rate and the staleness of METHOD-at-RATE-STALENESS."""
    at_rate, _, staleness = name.rpartition("-")
    method, _, rate = at_rate.rpartition("-at-")
    return method, rate, int(staleness)


def task_files(files: preference_data.Files) -> list[str]:
    """Return the settings that name the prompts."""
    return [f"--task.train_file={files.train}", f"--task.test_file={files.test}"]


def entrants(names: Sequence[str], rates: Sequence[str], staleness: Sequence[int]) -> list[Entrant]:
    """Return each method at each rate and staleness, which are parts of its name."""
    tried = [method.at(rate) for method in METHODS if method.name in names for rate in rates]
    return [
        Entrant(f"{t.name}-{s}", (*t.overrides, f"--sync.sync_every={sync_every(s)}"))
        for s in staleness
        for t in tried
    ]


def sync_every(staleness: int) -> int:
    """Return the k whose barrier has a mean staleness, (3k - 1) / 2, next to this."""
    return max(1, round((2 * staleness + 1) / 3))


def proxy_line(proxy: dict[str, Any]) -> str:
    """Say how good the proxy is."""
    before, after = proxy["before"], proxy["after"]
    return (
        f"Proxy reward model: accuracy {before['accuracy']:.3f} before and {after['accuracy']:.3f} "
        f"after {proxy['steps']} steps, on held-out pairs; its rewards have mean "
        f"{after['mean']:.2f} and deviation {after['std']:.2f}."
    )


def table(begin: dict[str, Any], found: Sequence[dict[str, Any]]) -> str:
    """Return the results as Markdown, mean and standard error over seeds."""
    first = {"staleness": 0.0, "report": begin}
    at_first = " | ".join(f"{figure(first):.3f}" for figure in FIGURES.values())
    rows = [
        f"| staleness | method | rate | seeds | {' | '.join(FIGURES)} |",
        "|---" * (4 + len(FIGURES)) + "|",
        f"| | (start) | | | {at_first} |",
    ]
    for name, own in by_method(found):
        cells = (spread(own, figure) for figure in FIGURES.values())
        method, rate, staleness = parts(name)
        rows.append(f"| {staleness} | {method} | {rate} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def picture(begin: dict[str, Any], found: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw win rate over KL, a picture a staleness, by `tba pareto`'s own code."""
    all_curves = curves(begin, found)
    write([asdict(curve) for curve in all_curves], out / "pareto.json")
    for staleness in dict.fromkeys(parts(curve.run)[2] for curve in all_curves):
        own = [curve for curve in all_curves if parts(curve.run)[2] == staleness]
        if not pareto.draw_picture(own, out / f"pareto-{staleness}.png"):
            print("no picture: it needs the extra report (matplotlib)")


def curves(begin: dict[str, Any], found: Sequence[dict[str, Any]]) -> list[Curve]:
    """Return a curve for each method, rate and staleness, whose points are means over seeds."""
    initial = Point(0, mean_report([begin]))
    drawn = []
    for name, own in by_method(found):
        reports = [dict(result["reports"]) for result in own]
        steps = sorted(set.intersection(*(set(each) for each in reports)))
        points = [Point(step, mean_report([each[step] for each in reports])) for step in steps]
        drawn.append(Curve(name, name, (initial, *points)))
    return drawn


def mean_report(reports: Sequence[dict[str, Any]]) -> PolicyReport:
    """Return the first report with the means of what a picture shows."""
    adapter = TypeAdapter(PolicyReport)
    read = [adapter.validate_python(report) for report in reports]
    return dataclasses.replace(
        read[0],
        kl=statistics.fmean(report.kl for report in read),
        measured={
            name: statistics.fmean(report.measured[name] for report in read)
            for name in read[0].measured
        },
    )


if __name__ == "__main__":
    main()
