"""`tba sft`."""

from tba.cli.app import SETTINGS_ALLOWED, ConfigurableCommand, app, split
from tba.cli.train import Arguments, Clean, DryRun, RunDir, start
from tba.config.sft import load_sft_config


@app.command(cls=ConfigurableCommand, context_settings=SETTINGS_ALLOWED)
def sft(
    arguments: Arguments = None,
    run_dir: RunDir = None,
    clean: Clean = False,
    dry_run: DryRun = False,
) -> None:
    """Fine-tune a policy on demonstrations; `tba train --resume RUN` goes on with it."""
    sources, overrides = split(arguments or [], ["run-dir", "clean", "dry-run"])
    start(load_sft_config, sources, overrides, run_dir=run_dir, clean=clean, dry_run=dry_run)
