"""What `fastfact bench` measures: a module a command, each with `run(quick=False) -> rows`, a row a flat dict.

Imports the package as its users do. Read `common.py` first. `bench/` in the repository keeps the pytest-benchmark
suites, the results and the notes on them.
"""
