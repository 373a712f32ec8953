"""Measurements that are no tests: each module is a command, run as `python -m benchmarks.NAME`."""
