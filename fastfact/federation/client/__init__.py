"""What happens at a client: its data, local training and evaluation, alone or many clients together.

`phase.py` is what a method says and sees, `train.py` how clients train, `step.py` how a cohort steps, `executor.py`
which clients train at the same time. Imports `nn`, `ops`, `data` and `federation.state`. Read `train.py` first.
"""
