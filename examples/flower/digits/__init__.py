"""The digits, personalized: an app that `flwr run` takes."""
