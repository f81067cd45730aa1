"""Tiny models of five kinds, and what Keras's own `fit` makes of them on one device: the reference, without Phalanx."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers
from keras_twins import crossentropy
from reference_training import CLASSES, mlp

ROWS, VALIDATION_ROWS, BATCH, EPOCHS = 1003, 107, 64, 5
"""Sixteen batches, and two of validation, each with a last one of 43 rows: neither all rows nor those of the validation divide by 2, 3 or 4."""

RANDOM = np.random.RandomState(5)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=(ROWS + VALIDATION_ROWS, *shape)).astype("float32")


def noisy(score: np.ndarray) -> np.ndarray:
    """Adds noise, so that no model can learn everything."""
    return score + 0.5 * normal(*score.shape[1:])


POINTS, IMAGES, SEQUENCES, PAIRS = normal(6), normal(8, 8, 1), normal(6, 3), {"a": normal(3), "b": normal(4)}
TOKENS = RANDOM.randint(0, 10, (ROWS + VALIDATION_ROWS, 6)).astype("int32")
KINDS = noisy(POINTS[:, :CLASSES]).argmax(1).astype("int32")
IS_BRIGHT = (noisy(IMAGES[:, 2:6, 2:6].sum((1, 2))) > 0).astype("float32")
KINDS_OF_SEQUENCES = noisy(SEQUENCES.sum(1)).argmax(1).astype("int32")
IS_EARLY = (noisy(TOKENS[:, :3].sum(1) - TOKENS[:, 3:].sum(1)) > 0).astype("float32")[:, None]
SUMS = noisy(PAIRS["a"].sum(1, keepdims=True) - PAIRS["b"][:, :1])
WEIGHTS = RANDOM.uniform(0, 2, ROWS + VALIDATION_ROWS).astype("float32")


def cnn(**normalization: bool) -> keras.Model:
    """A convolution with batch normalization."""
    inner = [layers.Conv2D(4, 3, strides=2), layers.BatchNormalization(momentum=0.9, **normalization), layers.ReLU()]
    return keras.Sequential([layers.Input((8, 8, 1)), *inner, layers.Flatten(), layers.Dense(1, activation="sigmoid")])


def lstm() -> keras.Model:
    return keras.Sequential([layers.Input((6, 3)), layers.LSTM(8), layers.Dense(CLASSES)])


def transformer() -> keras.Model:
    """One block, whose output reads every token."""
    tokens = keras.Input((6,), dtype="int32")
    h = layers.Embedding(10, 8)(tokens)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, h))
    h = layers.LayerNormalization()(h + layers.Dense(8)(layers.Dense(16, activation="gelu")(h)))
    return keras.Model(tokens, layers.Dense(1, activation="sigmoid")(layers.Flatten()(h)))


def two_inputs() -> keras.Model:
    """Inputs by name, and a penalty on the kernels."""
    dense = functools.partial(layers.Dense, kernel_regularizer=keras.regularizers.L2(0.01))
    inputs = {"a": layers.Input((3,), name="a"), "b": layers.Input((4,), name="b")}
    h = layers.Concatenate()([dense(6, activation="tanh")(inputs["a"]), dense(6, activation="tanh")(inputs["b"])])
    return keras.Model(inputs, dense(1)(dense(6, activation="tanh")(h)))


def of_classes() -> list[Any]:
    """Metrics of several classes."""
    return [
        "accuracy",
        keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2"),
        keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False, name="iou"),
    ]


def of_two_classes() -> list[Any]:
    """Metrics of two classes: accuracy, area under the curve, and those that count confusions."""
    counts = ["Precision", "Recall", "TruePositives", "FalsePositives", "TrueNegatives", "FalseNegatives"]
    return ["accuracy", keras.metrics.AUC(name="auc"), *(getattr(keras.metrics, n)(name=n) for n in counts)]


def of_numbers() -> list[Any]:
    return [keras.metrics.MeanAbsoluteError(name="mae"), keras.metrics.R2Score(name="r2")]


# Usual rates, at which every model learns within five epochs and none of them is near divergence: there the noise of
# float32 sums in another order would grow. After 80 steps it is below 4e-7, but for the key bias of attention.
SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam


@dataclass(frozen=True)
class Workload:
    """A model, how it is compiled, and its rows; the last of these are for validation."""

    model: Callable[..., keras.Model]
    arguments: Callable[[], dict[str, Any]]
    rows: tuple[Any, ...]

    def compiled(self, k: int = 1, **normalization: bool) -> keras.Model:
        """Makes the model, and compiles it for `k` steps in one execution."""
        keras.utils.set_random_seed(1)
        model = cnn(**normalization) if self.model is cnn else self.model()
        model.compile(**self.arguments(), steps_per_execution=k)
        return model

    def some(self, begin: int, end: int) -> tuple[Any, ...]:
        return keras.tree.map_structure(lambda x: x[begin:end], self.rows)


WORKLOADS = {
    "mlp": Workload(
        mlp,
        lambda: {"optimizer": SGD(0.1, momentum=0.9), "loss": crossentropy(), "metrics": of_classes()},
        (POINTS, KINDS),
    ),
    "cnn": Workload(
        cnn,
        lambda: {"optimizer": SGD(0.05, momentum=0.9), "loss": "binary_crossentropy", "metrics": of_two_classes()},
        (IMAGES, IS_BRIGHT),
    ),
    "lstm": Workload(
        lstm,
        lambda: {"optimizer": ADAM(0.01), "loss": crossentropy(), "metrics": of_classes()},
        (SEQUENCES, KINDS_OF_SEQUENCES),
    ),
    "transformer": Workload(
        transformer,
        lambda: {"optimizer": ADAM(0.003), "loss": "binary_crossentropy", "metrics": of_two_classes()},
        (TOKENS, IS_EARLY),
    ),
    "two_inputs": Workload(
        two_inputs,
        lambda: {
            "optimizer": ADAM(0.01),
            "loss": "mse",
            "metrics": of_numbers(),
            "weighted_metrics": [keras.metrics.MeanAbsoluteError(name="weighted_mae")],
        },
        (PAIRS, SUMS, WEIGHTS),
    ),
}


@dataclass(frozen=True)
class Trained:
    """What a training left behind."""

    history: dict[str, list[float]]
    evaluated: dict[str, float]
    predictions: np.ndarray
    weights: dict[str, np.ndarray]
    state: dict[str, np.ndarray]


def train(workload: Workload, model: keras.Model) -> Trained:
    """Fits with validation and shuffled rows, evaluates and predicts."""
    rows, validation = workload.some(0, ROWS), workload.some(ROWS, ROWS + VALIDATION_ROWS)
    given = dict(zip(("x", "y", "sample_weight"), rows, strict=False)) | {"batch_size": BATCH, "verbose": 0}
    keras.utils.set_random_seed(2)
    history = model.fit(**given, epochs=EPOCHS, validation_data=validation, shuffle=True).history
    evaluated = model.evaluate(**given, return_dict=True)
    predictions = model.predict(validation[0], batch_size=BATCH, verbose=0)
    return Trained(history, evaluated, predictions, by_path(model.variables), by_path(model.optimizer.variables))


def by_path(variables: list[keras.Variable]) -> dict[str, np.ndarray]:
    """Returns the values of variables by number and path: the numbers of layers differ from model to model."""
    return {f"{i} {v.path}": v.numpy() for i, v in enumerate(variables)}


@functools.cache
def train_on_one_device(name: str) -> Trained:
    """Trains in Keras's own loop, outside every scope."""
    return train(WORKLOADS[name], WORKLOADS[name].compiled())
