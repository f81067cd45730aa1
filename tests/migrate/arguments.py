"""The arrays that the expressions use."""

import numpy as np


def arguments():
    """Returns the arrays by name."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype("float32")  # noqa: E731
    root = normal(3, 3)
    return {
        "x": normal(3, 4),
        "y": normal(3, 4),
        "a": rng.uniform(0.2, 2, (3, 4)).astype("float32"),
        "u": rng.uniform(-0.9, 0.9, (3, 4)).astype("float32"),
        "p": rng.uniform(0.05, 0.95, (3, 4)).astype("float32"),
        "v": normal(4),
        "w": normal(3),
        "w4": normal(4),
        "a4": rng.uniform(0.2, 2, 4).astype("float32"),
        "m": root @ root.T + 3 * np.eye(3, dtype="float32"),
        "i": rng.integers(0, 9, (3, 4)).astype("int32"),
        "j": np.array([2, 0, 3], "int32"),
        "b": rng.random((3, 4)) > 0.5,
        "c": rng.random((3, 4)) > 0.5,
        "s": normal(2, 3, 4),
        "g": rng.random((2, 6, 6, 3)).astype("float32"),
        "k": normal(3, 3, 3, 2),
        "z": (normal(4) + 1j * normal(4)).astype("complex64"),
        "one": np.eye(4, dtype="float32")[[2, 0, 3]],
    }
