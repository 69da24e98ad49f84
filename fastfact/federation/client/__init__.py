"""What happens at a client: its data, local training and evaluation, alone or many clients together.

Imports `nn`, `ops` and `federation.state`. Read `train.py` first.
"""
