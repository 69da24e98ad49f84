"""What travels between clients and server: how tensors become bytes, and the count of these.

Imports `ops` and `federation.state`. Read `format.py` first, then `ledger.py`, which counts.
"""
