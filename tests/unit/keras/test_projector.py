"""The files that TensorBoard's projector reads."""

import numpy as np
import pytest

from phalanx.keras import projector


def test_files_of_several_embeddings(tmp_path):
    """Each with its labels, or without; names are quoted, and an earlier epoch is replaced."""
    rows = {"a": np.arange(6.0).reshape(3, 2), 'b "ß"': np.full((1, 2), 1 / 3, np.float32)}
    for factor in (1, 2):
        projector.write(str(tmp_path), {name: x * factor for name, x in rows.items()}, {"a": "a.tsv"})
    assert (tmp_path / "projector_config.pbtxt").read_text(encoding="utf-8") == (
        'embeddings {\n  tensor_name: "a"\n  tensor_path: "embeddings/a.tsv"\n  metadata_path: "a.tsv"\n}\n'
        'embeddings {\n  tensor_name: "b \\"ß\\""\n  tensor_path: "embeddings/b \\"ß\\".tsv"\n}\n'
    )
    assert (tmp_path / "embeddings" / "a.tsv").read_text() == "0\t2\n4\t6\n8\t10\n"
    assert sorted(p.name for p in (tmp_path / "embeddings").iterdir()) == ["a.tsv", 'b "ß".tsv']


def test_links_of_others_are_not_written_to(tmp_path):
    """Nobody knows the name of a file that is not ready."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "projector_config.pbtxt.part").symlink_to(victim)
    projector.write(str(tmp_path), {"a": np.ones((1, 1))}, None)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["embeddings", "embeddings/a.tsv", "projector_config.pbtxt"])
def test_links_in_place_of_files_and_folders_are_not_followed(tmp_path, name):
    log, elsewhere = tmp_path / "log", tmp_path / "elsewhere"
    (log / name).parent.mkdir(parents=True)
    elsewhere.mkdir()
    (log / name).symlink_to(elsewhere)
    with pytest.raises(OSError, match="It is a link|Not a directory"):
        projector.write(str(log), {"a": np.ones((1, 1))}, None)
    assert not list(elsewhere.iterdir())
