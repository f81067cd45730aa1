"""Fingerprints are those of FarmHash, as TensorFlow computes them."""

import json
import runpy
from pathlib import Path

import numpy as np

from phalanx.feature_column.fingerprint import concatenated, fingerprint64

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "recorded_hashes.json").read_text(encoding="utf-8"))
TEXT = runpy.run_path(str(HERE / "record_hashes.py"))["text"]


def test_fingerprints_of_all_lengths():
    """Each branch of the algorithm, and both sides of the lengths between them."""
    expected = {int(length): int(value) for length, value in RECORDED["fingerprints"].items()}
    assert fingerprint64([TEXT(length) for length in expected]).tolist() == [*expected.values()]


def test_fingerprints_do_not_depend_on_the_batch():
    """A string has the same fingerprint alone and among others of its length, in any order."""
    texts = [TEXT(length)[::step] for length in (5, 70, 150) for step in (1, -1)] * 2
    assert fingerprint64(texts).tolist() == [int(fingerprint64([text])[0]) for text in texts]
    assert fingerprint64([]).shape == (0,)


def test_concatenated_fingerprints_depend_on_the_order():
    one, two = fingerprint64([b"one"]), fingerprint64([b"two"])
    assert concatenated(one, two) != concatenated(two, one)
    assert concatenated(one, two).dtype == np.uint64
