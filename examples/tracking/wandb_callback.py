"""Weights & Biases: fastfact --use examples/tracking/wandb_callback.py run --track wandb --out runs/a"""

import wandb

import fastfact as ff


class WandB(ff.Callback, name="wandb"):
    def __init__(self, directory):
        self.run = wandb.init(project="fastfact", name=str(directory))

    def on_round(self, fed, rows):
        self.run.log(self.means(rows), step=rows[0]["round"])

    def on_end(self, fed):
        self.run.finish()
