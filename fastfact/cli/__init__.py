"""The command line: `main` has the commands, `terminal` what they show while they run.

Imports everything. Read `main.py` first.
"""
