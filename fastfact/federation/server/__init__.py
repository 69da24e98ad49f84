"""What happens at the server: what a method is, the exchange of a round, the mixing matrix, the processes.

Imports `nn`, `ops`, `federation.state`, `federation.client` and `federation.wire`. Read `strategy.py` first.
"""
