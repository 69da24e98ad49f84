"""MLflow: fastfact --use examples/tracking/mlflow_callback.py run --track mlflow --out runs/a"""

import mlflow

import fastfact as ff


class MLflow(ff.Callback, name="mlflow"):
    def __init__(self, directory):
        mlflow.start_run(run_name=str(directory))

    def on_round(self, fed, rows):
        mlflow.log_metrics(self.means(rows), step=rows[0]["round"])

    def on_end(self, fed):
        mlflow.end_run()
