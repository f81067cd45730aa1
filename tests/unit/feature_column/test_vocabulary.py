"""Vocabularies in lists and files."""

import jax
import numpy as np
import pytest
from refusals import refusals, refused

from phalanx import errors, feature_column

with_list = feature_column.categorical_column_with_vocabulary_list
with_file = feature_column.categorical_column_with_vocabulary_file


@pytest.mark.parametrize("content", [b"red\ngreen", b"red\ngreen\n", b"red\r\ngreen\r\n"])
def test_lines_of_a_file_are_words(content, tmp_path):
    """With and without a last line end, and with line ends of Windows."""
    (tmp_path / "words.txt").write_bytes(content)
    column = with_file("word", tmp_path / "words.txt")
    assert column.num_buckets == 2
    ids = feature_column.prepare({"word": ["green", "red", "x"]}, column)["word:vocabulary"]
    assert ids[:, 0].tolist() == [1, 0, -1]


test_bad_vocabularies_are_refused = refusals(
    errors.InvalidArgumentError,
    (lambda: with_list("w", []), r"vocabulary_list=\[\] of the column of 'w': must be a list of words, .*\nHINT: "),
    (lambda: with_list("w", np.zeros(2, [("a", "f4")])), r"vocabulary_list=.*must be a list of words, not empty"),
    (lambda: with_list("w", jax.random.split(jax.random.key(0))), r"(?s)vocabulary_list=.*must be a list of words"),
    (lambda: with_list("w", "ab"), r"vocabulary_list='ab' .*must be a list of words, not empty.\nHINT: "),
    (lambda: with_list("w", ["a", "a"]), r"vocabulary_list=.* of the column of 'w': has a word twice.\nHINT: "),
    (lambda: with_list("w", ["a"], dtype=int), r"of the column of 'w': the words have the dtype <U1.\nHINT: "),
    (lambda: with_list("w", [0.5]), r"dtype\('float64'\) of the column of 'w': must be a string or.*\nHINT: "),
    (lambda: with_list("w", ["a"], default_value=1), r"default_value=1: must be an integer from -1 to 0.\nHINT: "),
    (
        lambda: with_list("w", ["a"], default_value=0, num_oov_buckets=1),
        r"num_oov_buckets=1 and default_value=0 of the column of 'w': .*either one.\nHINT: num_oov_buckets=1",
    ),
    (lambda: with_list("w", ["a"], num_oov_buckets=-1), r"num_oov_buckets=-1: must be an integer from 0.*\nHINT: "),
    (lambda: with_file("w", 3), r"vocabulary_file=3: must be a path.\nHINT: "),
    (
        lambda: with_file("w", "/dev/zero"),
        r"'/dev/zero' of the column of 'w': it cannot be read: it is a device or a pipe.\nHINT: ",
    ),
    (lambda: with_file("w", "absent.txt"), r"'absent.txt' of the column of 'w': it cannot be read: No such.*\nHINT: "),
)


def test_bad_files_are_refused(tmp_path):
    """A file is read when the column is made, so its errors are those of the column."""
    for content, arguments, match in (
        (b"", {}, r"vocabulary_size=0: must be an integer from 1 .*\nHINT: "),
        (
            b"a\nb\n",
            {"vocabulary_size": 3},
            r"of 'w': it must have 3 different lines, and has 2.\nHINT: vocabulary_size=2",
        ),
        (b"a\na\n", {}, r"it must have 2 different lines, and has 1.\nHINT: a file without duplicates"),
        (b"1\nb\n", {"dtype": int}, r"words.txt': a line is not an integer.\nHINT: dtype=str"),
    ):
        (tmp_path / "words.txt").write_bytes(content)
        with refused(errors.InvalidArgumentError, match):
            with_file("w", tmp_path / "words.txt", **arguments)
