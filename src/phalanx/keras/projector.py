# SPDX-License-Identifier: Apache-2.0
"""Files of embeddings for TensorBoard's projector."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

from phalanx._src.cluster.untrusted import new_file
from phalanx.errors import InvalidArgumentError

_CONFIG = "projector_config.pbtxt"


def embeddings_of(model: keras.Model) -> list[keras.layers.Embedding]:
    """Returns the embedding layers of a model, without those of models inside it."""
    return [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]


def require_known(metadata: str | Mapping[str, str] | None, model: keras.Model) -> None:
    """Checks the names of layers.

    Raises:
      InvalidArgumentError: `metadata` has a name that is not the name of an embedding layer.
    """
    names = [layer.name for layer in embeddings_of(model)]
    unknown = sorted(set(metadata) - set(names)) if isinstance(metadata, Mapping) else []
    if unknown:
        raise InvalidArgumentError(
            f"embeddings_metadata with {unknown[0]!r}",
            f"the embedding layers of {model.name!r} are: {', '.join(names) or 'none'}.",
            f"embeddings_metadata={{{names[0]!r}: ...}}" if names else "embeddings_freq=0",
        )


def write(folder: str, embeddings: Mapping[str, np.ndarray], metadata: str | Mapping[str, str] | None) -> None:
    """Writes a TSV file per embedding, and the file that lists them.

    Args:
      folder: the folder of the logs.
      embeddings: the rows, by layer name.
      metadata: path of a file with labels, or a dict of such paths by layer name.

    Source: `tensorboard/plugins/projector/projector_config.proto`.
    """
    entries = []
    for name, rows in embeddings.items():
        fields = {"tensor_name": name, "tensor_path": os.path.join("embeddings", f"{name}.tsv")}
        labels = metadata if isinstance(metadata, str) else (metadata or {}).get(name)
        if labels is not None:
            fields["metadata_path"] = labels
        _replace(folder, fields["tensor_path"], "".join("\t".join(f"{x:.7g}" for x in row) + "\n" for row in rows))
        entries.append(fields)
    # Last, so that a reader of this file finds all files that it names.
    _replace(folder, _CONFIG, _listed(entries))


def _listed(entries: list[dict[str, str]]) -> str:
    """Returns the list of embeddings, as a protocol buffer in the form of text."""
    # The text form of protocol buffers has the escapes that `json.dumps` writes.
    texts = ("".join(f"  {key}: {json.dumps(text, ensure_ascii=False)}\n" for key, text in e.items()) for e in entries)
    return "".join(f"embeddings {{\n{text}}}\n" for text in texts)


def _replace(folder: str, name: str, text: str) -> None:
    """Writes a file that a reader never sees half-written."""
    with new_file(Path(folder, name), Path(folder)) as opened:
        opened.write(text.encode())
