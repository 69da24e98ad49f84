"""Runs and comparisons by configuration, what is recorded of them, and their report.

`config` says what a run is, `build` makes its federation, `run` trains it and leaves a directory, `compare` spreads
many over processes; `report` and `plots` read directories alone. Imports `methods`, `federation`, `data`, `models` and
what stands below them. Read `run.py` first.
"""
