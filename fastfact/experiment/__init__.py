"""Runs and comparisons by configuration, what is recorded of them, and their report.

Imports `methods`, `federation`, `data`, `models` and what stands below them. Read `run.py` first.
"""
