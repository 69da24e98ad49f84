"""What outlives a round: the states of clients at rest, checkpoints, the run directory.

Imports `federation.state` and `federation.wire`. Read `run_directory.py` first.
"""
