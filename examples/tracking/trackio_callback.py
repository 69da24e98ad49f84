"""Trackio: fastfact --use examples/tracking/trackio_callback.py run --track trackio --out runs/a"""

import trackio

import fastfact as ff


class Trackio(ff.Callback, name="trackio"):
    def __init__(self, directory):
        self.run = trackio.init(project="fastfact", name=str(directory))

    def on_round(self, fed, rows):
        self.run.log(self.means(rows), step=rows[0]["round"])

    def on_end(self, fed):
        self.run.finish()
