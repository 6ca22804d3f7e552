"""Benchmarks: one module a subcommand of `blockmgr bench`. Every result is a ratio of things measured in one run."""
