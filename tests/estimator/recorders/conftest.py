"""Keeps pytest from importing the recorders: they need TensorFlow 2.15."""

collect_ignore_glob = ["*.py"]
