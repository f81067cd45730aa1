"""Small data for the guides of Estimators, and what their models compute, in NumPy."""

import numpy as np

from phalanx.estimator import tf1

FEATURES, LABELS = [[1.0, 1.5], [2.0, 2.5], [3.0, 3.5]], [[0.3], [0.5], [0.7]]
EVAL_FEATURES, EVAL_LABELS = [[4.0, 4.5], [5.0, 5.5], [6.0, 6.5]], [[0.8], [0.9], [1.0]]
FLOWER_NAMES = ("SepalLength", "SepalWidth", "PetalLength", "PetalWidth")


def irises():
    """Features by name, and species, for training and for a test."""
    from sklearn.datasets import load_iris

    rows, species = load_iris(return_X_y=True)
    is_test = np.arange(len(rows)) % 5 == 0
    return [
        (dict(zip(FLOWER_NAMES, rows[chosen].T.astype("float32"), strict=True)), species[chosen].astype("int32"))
        for chosen in (~is_test, is_test)
    ]


def digits():
    """Images of 8 times 8 pixels from 0 to 1, and their digits, for training and for a test."""
    from sklearn.datasets import load_digits

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


def network(model, rows, layers):
    """The logits of a deep network from the values of its variables, in NumPy."""
    for layer in [*(f"hiddenlayer_{i}" for i in range(layers)), "logits"]:
        kernel, bias = (model.get_variable_value(f"dnn/{layer}/{name}") for name in ("kernel", "bias"))
        logits = rows @ kernel + bias
        rows = np.maximum(logits, 0)
    return logits


def input_fn():
    return tf1.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(1)


def eval_input_fn():
    return tf1.data.Dataset.from_tensor_slices((EVAL_FEATURES, EVAL_LABELS)).batch(1)


def linear_model_fn(features, labels, mode):
    logits = tf1.layers.Dense(1)(features)
    loss = tf1.losses.mean_squared_error(labels=labels, predictions=logits)
    optimizer = tf1.train.AdagradOptimizer(0.05)
    train_op = optimizer.minimize(loss, global_step=tf1.train.get_global_step())
    return tf1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


class Adagrad:
    """The layer of `linear_model_fn`, trained with TensorFlow's Adagrad from the first values in a folder of checkpoints."""

    def __init__(self, folder):
        reader = tf1.train.load_checkpoint(f"{folder}/model.ckpt-0")
        self.weights = [reader.get_tensor(f"dense/{name}") for name in ("kernel", "bias")]
        self.squares = [np.full_like(weight, 0.1) for weight in self.weights]

    def error(self, features, labels):
        return np.asarray(features, "float32") @ self.weights[0] + self.weights[1] - np.asarray(labels, "float32")

    def loss(self, features, labels):
        return float(np.mean(self.error(features, labels) ** 2))

    def step(self, features, labels):
        """Updates the weights. Returns the loss before."""
        loss, error = self.loss(features, labels), self.error(features, labels)
        slope = 2 * error / error.size
        for i, gradient in enumerate((np.asarray(features, "float32").T @ slope, slope.sum(axis=0))):
            self.squares[i] = self.squares[i] + gradient**2
            self.weights[i] = self.weights[i] - 0.05 * gradient / np.sqrt(self.squares[i])
        return loss
