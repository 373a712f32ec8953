"""Asynchronous, off-policy reinforcement learning of language models with trajectory balance."""
