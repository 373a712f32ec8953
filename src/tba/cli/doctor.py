"""`tba doctor`."""

import typer
from rich.table import Table
from rich.text import Text

from tba.cli.app import EXIT_FAILED, app, wide_console


@app.command()
def doctor() -> None:
    """Say what this machine has, and what is missing for which extra."""
    from tba.doctor import examine

    findings = examine()
    table = Table("", "found", "to get what is missing", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(*map(Text, (finding.what, finding.found, finding.remedy)))
    wide_console().print(table)
    if any(finding.is_fatal for finding in findings):
        raise typer.Exit(EXIT_FAILED)
