"""What happens at the server: what a method is, the exchange of a round, the mixing matrix, the processes.

`exchange.py` has the two steps of a round, `client_round` and `server_round`, as functions. Imports `nn`, `ops`,
`federation.state`, `federation.client` and `federation.wire`. Read `strategy.py` first.
"""
