"""Predictions of steps with good arguments."""

import tempfile
from pathlib import Path

import keras
import numpy as np
from bad_values import Case

import phalanx
from phalanx._src.tools.estimate.api import Estimates


def train():
    with phalanx.MirroredStrategy(1).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


def of_forecasts():
    folder = Path(tempfile.mkdtemp(prefix="phalanx-forecasts-"))
    return {
        "estimate": Case(phalanx.estimate, {"train": train, "topologies": ["cpu:1"]}, functions=("train",)),
        "Estimates.save": Case(Estimates("step", []).save, {"path": folder / "found.json"}),
    }


GROUPS = {"forecasts": of_forecasts}
