"""The run folder: what a run writes, and how it is resumed."""
