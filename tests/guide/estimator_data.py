"""Small data for the guides of Estimators, and what their models compute, in NumPy."""

import numpy as np
from sklearn.datasets import load_digits, load_iris

FEATURES, LABELS = [[1.0, 1.5], [2.0, 2.5], [3.0, 3.5]], [[0.3], [0.5], [0.7]]
EVAL_FEATURES, EVAL_LABELS = [[4.0, 4.5], [5.0, 5.5], [6.0, 6.5]], [[0.8], [0.9], [1.0]]
FLOWER_NAMES = ("SepalLength", "SepalWidth", "PetalLength", "PetalWidth")


def irises():
    """Features by name, and species, for training and for a test."""
    rows, species = load_iris(return_X_y=True)
    is_test = np.arange(len(rows)) % 5 == 0
    return [
        (dict(zip(FLOWER_NAMES, rows[chosen].T.astype("float32"), strict=True)), species[chosen].astype("int32"))
        for chosen in (~is_test, is_test)
    ]


def digits():
    """Images of 8 times 8 pixels from 0 to 1, and their digits, for training and for a test."""
    images, numbers = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype("float32")
    return (images[:1500], numbers[:1500]), (images[1500:], numbers[1500:])


def passengers(count, seed):
    """A table like that of the Titanic's passengers, and who survived: mostly women, and few in the third class."""
    random = np.random.default_rng(seed)
    table = {
        "sex": random.choice(["male", "female"], count, p=[0.65, 0.35]),
        "age": random.integers(1, 70, count) + random.choice([0, 0.5], count),
        "n_siblings_spouses": random.integers(0, 4, count),
        "parch": random.integers(0, 3, count),
        "fare": random.gamma(2.0, 15.0, count),
        "class": random.choice(["First", "Second", "Third"], count),
        "deck": random.choice(["A", "B", "unknown"], count),
        "embark_town": random.choice(["Southampton", "Cherbourg"], count),
        "alone": random.choice(["y", "n"], count),
    }
    odds = 2.5 * (table["sex"] == "female") - 1.5 * (table["class"] == "Third") - 1.0
    return table, (random.random(count) < 1 / (1 + np.exp(-odds))).astype("int64")


def mean_squared_error(weights, features, labels):
    """The loss of one layer without activation."""
    kernel, bias = weights
    return float(np.mean((np.asarray(features) @ kernel + bias - np.asarray(labels)) ** 2))


class Adagrad:
    """One layer without activation, trained on the mean squared error with TensorFlow's Adagrad."""

    def __init__(self, kernel, bias, rate):
        self.weights, self.squares, self.rate = (
            [kernel, bias],
            [np.full_like(kernel, 0.1), np.full_like(bias, 0.1)],
            rate,
        )

    def step(self, features, labels):
        """Updates the weights. Returns the loss before."""
        x, y = np.asarray(features, "float32"), np.asarray(labels, "float32")
        error = x @ self.weights[0] + self.weights[1] - y
        slope = 2 * error / error.size
        for i, gradient in enumerate((x.T @ slope, slope.sum(axis=0))):
            self.squares[i] = self.squares[i] + gradient**2
            self.weights[i] = self.weights[i] - self.rate * gradient / np.sqrt(self.squares[i])
        return float(np.mean(error**2))
