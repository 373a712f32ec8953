"""An analysis to read: tables for a terminal or a file, and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from tba.analyse import Analysis
from tba.run.durable import storage_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS = (
    ("samples in the buffer", "samples"),
    ("queries drawn", "queries"),
    ("distinct among drawn samples", "unique_share"),
    ("|log pi - log mu|, nats a token", "log_prob_mismatch"),
    ("KL(mu || pi) by k1, nats a response", "kl_k1"),
    ("KL(mu || pi) by k3, nats a response", "kl_k3"),
    ("effective sample share", "effective_sample_share"),
    ("clipped share of tokens", "clipped_share"),
    ("share of tokens outside 0.8-1.2", "outside_share"),
    ("log Z, VarGrad, nats", "log_z"),
    ("log Z, from the reference, nats", "log_z_reference"),
    ("difference on those queries, nats", "log_z_difference"),
    ("queries with reference responses", "reference_queries"),
)
"""Names of the figures that the samples give, and their fields."""
_CURVES = (
    ("nats", ("log_prob_mismatch", "kl_k1", "kl_k3")),
    ("share", ("effective_sample_share", "clipped_share", "outside_share")),
    ("VarGrad log Z too high by, nats", ("log_z_difference",)),
)


def tables(analysis: Analysis, *, plain: bool) -> list[Table]:
    """Return the figures of the samples, losses, gradient norms, and one matrix of cosines a bin.

    `plain` leaves out the lines around them.
    """
    style = None if plain else box.HEAVY_HEAD
    names = [report.bin for report in analysis.bins]
    samples = [
        [title, *(_number(getattr(report, field)) for report in analysis.bins)]
        for title, field in ROWS
    ]
    found = [_table("staleness, versions", names, samples, style)]
    for title, field in (("loss", "loss"), ("gradient norm", "grad_norm")):
        rows = [
            [kind, *(_number(getattr(report, field)[kind]) for report in analysis.bins)]
            for kind in analysis.objectives
        ]
        found.append(_table(f"{title} by staleness", names, rows, style))
    for report in analysis.bins:
        rows = [
            [kind, *(f"{value:.3f}" for value in row)]
            for kind, row in zip(analysis.objectives, report.cosine, strict=True)
        ]
        title = f"cosine of gradients, staleness {report.bin}"
        found.append(_table(title, analysis.objectives, rows, style))
    return found


def draw_picture(analysis: Analysis, path: Path) -> bool:
    """Draw the same as a picture; return whether matplotlib is here to do it.

    Raises:
        StorageError: The disk refused it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    columns = max(len(_CURVES) + 1, len(analysis.bins))
    figure = Figure(figsize=(3.2 * columns, 8.0), layout="constrained")
    grid = figure.add_gridspec(2, columns)
    for column, (unit, fields) in enumerate(_CURVES):
        series = {field: [getattr(report, field) for report in analysis.bins] for field in fields}
        _curves(figure.add_subplot(grid[0, column]), analysis, unit, series)
    norms = {
        kind: [report.grad_norm[kind] for report in analysis.bins] for kind in analysis.objectives
    }
    axes = figure.add_subplot(grid[0, len(_CURVES)])
    _curves(axes, analysis, "gradient norm", norms)
    if any(value > 0 for values in norms.values() for value in values):
        axes.set_yscale("log")
    for column, report in enumerate(analysis.bins):
        _matrix(figure.add_subplot(grid[1, column]), analysis, report.bin, report.cosine)
    figure.suptitle(f"{analysis.run}, step {analysis.step}, by staleness of the samples")
    with storage_errors(f"picture {path}"):
        figure.savefig(path, dpi=120)
    return True


def _curves(
    axes: "Axes", analysis: Analysis, unit: str, series: Mapping[str, Sequence[float | None]]
) -> None:
    places = range(len(analysis.bins))
    for name, values in series.items():
        known = [(at, value) for at, value in zip(places, values, strict=True) if value is not None]
        axes.plot([at for at, _ in known], [value for _, value in known], marker="o", label=name)
    axes.set_xticks(list(places), [report.bin for report in analysis.bins], rotation=45)
    axes.set_xlabel("staleness, versions")
    axes.set_ylabel(unit)
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.3))


def _matrix(axes: "Axes", analysis: Analysis, name: str, cosine: Sequence[Sequence[float]]) -> None:
    axes.imshow(cosine, vmin=-1, vmax=1, cmap="RdBu")
    places = list(range(len(analysis.objectives)))
    axes.set_xticks(places, analysis.objectives, rotation=90, fontsize="x-small")
    axes.set_yticks(places, analysis.objectives, fontsize="x-small")
    for row, values in enumerate(cosine):
        for column, value in enumerate(values):
            ink = "white" if abs(value) > 0.6 else "black"
            text = f"{value:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=5, color=ink)
    axes.set_title(f"cosines, staleness {name}", fontsize="small")


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], style: box.Box | None
) -> Table:
    table = Table(title=title, title_justify="left", box=style)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
