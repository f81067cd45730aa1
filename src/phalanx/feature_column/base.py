# SPDX-License-Identifier: Apache-2.0
"""What a column is: a frozen description, whose inputs are prepared on the host and whose rows are computed on the devices."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import keras
import numpy as np
from numpy.typing import NDArray

from phalanx.feature_column.raw import Feature
from phalanx.typing import PyTree

# TensorFlow's sparse tensors leave missing values out. Dense arrays of ids
# need a value for them, and -1 is TensorFlow's own.
MISSING = -1
"""The id of a missing value, and of a value that is not in a vocabulary."""


class AbstractInput(ABC):
    """An array of a batch that a program reads. Every column has some."""

    @property
    @abstractmethod
    def prepared_key(self) -> str:
        """The name of the prepared array."""

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The names of the raw features that the array is computed from."""

    @abstractmethod
    def array(self, features: Mapping[str, PyTree]) -> Feature:
        """Returns the array, computed from raw features on the host."""

    def add_to(self, prepared: dict[str, Any], features: Mapping[str, Any]) -> None:
        """Adds the array to `prepared`: a prepared one unchanged, or one that is computed from raw features."""
        key = self.prepared_key
        # Features that were prepared before pass unchanged, so that `prepare` may be
        # called twice: in the dataset and by the layer.
        prepared[key] = features[key] if key in features else self.array(features)


class AbstractRawInput(AbstractInput):
    """An array that is checked in each batch, prepared or not. It has the name of its feature."""

    key: str

    @property
    def prepared_key(self) -> str:
        """The name of the feature."""
        return self.key

    @property
    def keys(self) -> tuple[str, ...]:
        """The name of the feature."""
        return (self.key,)

    def add_to(self, prepared: dict[str, Any], features: Mapping[str, Any]) -> None:
        """Adds the array to `prepared`."""
        prepared[self.key] = self.array(features)


class AbstractDescription:
    """A frozen dataclass that Keras saves with a model."""

    def get_config(self) -> dict[str, Any]:
        """Returns the fields, as Keras saves them."""
        return {
            one.name: keras.saving.serialize_keras_object(getattr(self, one.name))
            for one in fields(self)  # type: ignore[arg-type]
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a column from the result of `get_config`."""
        return cls(**{name: keras.saving.deserialize_keras_object(value) for name, value in config.items()})


class AbstractColumn(AbstractDescription, ABC):
    """A column. Its subclasses are frozen dataclasses, so equal columns are equal keys of a dict."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the column, which orders columns and is a part of the names of variables."""

    @abstractmethod
    def inputs(self) -> Iterator[AbstractInput]:
        """Returns the arrays that a program reads for this column."""


@keras.saving.register_keras_serializable(package="phalanx")
@dataclass(frozen=True)
class Table(AbstractDescription):
    """Rows to look up ids in: what `embedding_column` trains. Columns share a table if all but the initializers are equal."""

    name: str
    num_buckets: int
    dimension: int
    # Keras makes a new object of "zeros" at each call. Compared, two columns with one table would get two.
    initializer: PyTree = field(compare=False)
    trainable: bool


class AbstractDenseColumn(AbstractColumn):
    """A column that a program computes a row of numbers for."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The length of a row."""

    @abstractmethod
    def rows(self, prepared: Mapping[str, Any], tables: Mapping[Table, jax.Array]) -> jax.Array:
        """Returns the rows, (batch, width) of float32, in a program."""

    @property
    def table(self) -> Table | None:
        """The table that the rows are looked up in, if there is one."""
        return None


class Occurrences(NamedTuple):
    """Values of categories on the host, (batch, k), and which of them are not missing."""

    values: NDArray[Any]
    is_present: NDArray[np.bool_]


class AbstractCategoricalColumn(AbstractColumn):
    """A column of ids below `num_buckets`."""

    @property
    @abstractmethod
    def num_buckets(self) -> int:
        """The number of ids."""

    @abstractmethod
    def occurrences(self, features: Mapping[str, Any]) -> Occurrences:
        """Returns the ids of raw features, on the host. A cross hashes also ids that are not in a vocabulary."""

    @abstractmethod
    def ids(self, prepared: Mapping[str, Any]) -> jax.Array:
        """Returns the ids in a program, (batch, k). `MISSING` or a smaller one counts for nothing."""

    def weights(self, prepared: Mapping[str, Any]) -> jax.Array | None:
        """Returns the weight of each id in a program, (batch, k). None if each weight is 1."""
        return None


class AbstractHostColumn(AbstractCategoricalColumn, AbstractInput):
    """A categorical column whose ids are computed on the host. They are an input of the program."""

    kind: ClassVar[str]

    @property
    def prepared_key(self) -> str:
        """The name of the ids. The kind is a part of it, because two columns may read one feature."""
        return f"{self.name}:{self.kind}"

    def inputs(self) -> Iterator[AbstractInput]:
        """Returns the column itself, whose ids are an array."""
        yield self

    def array(self, features: Mapping[str, PyTree]) -> Feature:
        """Returns the ids, (batch, k) of int32."""
        # One dtype and one value for missing, whatever the column: the program has a single case.
        ids, is_present = self.occurrences(features)
        return np.where(is_present & (ids >= 0), ids, MISSING).astype(np.int32)

    def ids(self, prepared: Mapping[str, Any]) -> jax.Array:
        """Returns the prepared ids."""
        return jnp.asarray(prepared[self.prepared_key], jnp.int32)
