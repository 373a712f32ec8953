"""The run folder and what is in it: configuration, metrics, summary, rollouts and checkpoints."""
