"""The tables and figures of the papers: a TOML file a paper, resolved to runs, and what is measured and drawn of them.

Imports `experiment` and what stands below it. Read `recipes.py` first.
"""
