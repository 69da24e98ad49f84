"""Random inputs, valid and not, for what takes inputs from outside. Read `ops.py` first; run by `python -m tests.fuzz`.

A module here is a target: its `run(seconds, seed)` tries inputs for so long and returns how many it tried.
"""
