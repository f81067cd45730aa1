# SPDX-License-Identifier: Apache-2.0
"""A Keras optimizer that runs a gradient transformation of Optax. Optax itself is not imported."""

import contextlib
import functools
from collections.abc import Iterator, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.compat import FirstValue, JointOptimizer, Variable
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import InvalidArgumentError, VariableError, listed, shown
from phalanx.typing import PyTree

_RATE, _SCHEDULE = "hyperparams_learning_rate", "hyperparams_states_learning_rate"
"""The ends of the names of the learning rate, and of what its schedule counts, in a state of `optax.inject_hyperparams`."""


@keras.saving.register_keras_serializable(package="phalanx")
class OptaxOptimizer(JointOptimizer):
    """Updates variables by a gradient transformation of Optax, under every strategy and layout. May be created in any context.

    The state of the transformation is stored in variables. An array of the state that belongs to a trained variable and has its shape is
    sharded like it.

    With `model.compile`, the transformation sees the parameters as the list `model.trainable_variables`. In a custom step, pass a pytree of
    variables and their gradients: `optimizer.apply(gradients, variables)` sums the gradients over the replicas.

    `learning_rate` is the variable of `optax.inject_hyperparams`. Without it, the transformation has its own rate, which callbacks cannot read
    or change. A `.keras` file contains the state, but not the transformation: see `from_config`.

    Args:
      transformation: an object with the functions `init` and `update`, for example `optax.adamw(1e-3)`.
      name: name of the optimizer.
      **options: other arguments of Keras optimizers, which are refused.

    Raises:
      InvalidArgumentError: `transformation` has no functions `init` and `update`, or an argument of other optimizers is passed.

    Source: optax.GradientTransformation.

    Example:
      >>> import keras, numpy as np, optax, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], layout=phalanx.fully_sharded())
      >>> with strategy.scope():
      ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
      ...     model.compile(phalanx.keras.OptaxOptimizer(optax.adamw(1e-3)), "mse")
      >>> _ = model.fit(np.ones((8, 64)), np.ones((8, 64)), verbose=0)
      >>> [v.value.addressable_shards[0].data.shape for v in model.optimizer.variables if v.shape == (64, 64)]
      [(32, 64), (32, 64)]
    """

    def __init__(self, transformation: PyTree, name: str | None = None, **options: PyTree) -> None:
        functions = [getattr(transformation, n, None) for n in ("init", "update")]
        if isinstance(transformation, type) or not all(map(callable, functions)):
            raise InvalidArgumentError(
                f"OptaxOptimizer(transformation={shown(transformation)})",
                "must have the functions init and update.",
                "transformation=optax.adamw(1e-3)",
            )
        if options:
            option, value = next(iter(options.items()))
            raise InvalidArgumentError(
                f"OptaxOptimizer({option}={shown(value)})",
                "it has no options, because the transformation does all that is done to gradients.",
                "optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.01)), or optax.MultiSteps for accumulation",
            )
        if name is not None and not (isinstance(name, str) and name and "/" not in name):
            raise InvalidArgumentError(f"name={shown(name)}", "must be a text without '/', or None.", 'name="adamw"')
        super().__init__(self._update, lambda: self.learning_rate, name)
        self._transformation = transformation
        self._tree: _Tree | None = None
        self._state_structure: PyTree = None
        self._state: tuple[Variable, ...] = ()
        self._kinds: tuple[str, ...] = ()

    @property
    def learning_rate(self) -> Variable:
        """The variable of `optax.inject_hyperparams` that holds the learning rate.

        Raises:
          InvalidArgumentError: there is none, or there are several; or it is assigned, and a schedule computes it.
        """
        if self._tree is None:
            raise _no_rate("the optimizer is not built yet.", "optimizer.build(model.trainable_variables)")
        rates = [v for v, kind in zip(self._state, self._kinds, strict=True) if kind.endswith(_RATE)]
        if len(rates) != 1:
            raise _no_rate("the transformation does not show one learning rate: its functions contain it.")
        return rates[0]

    @learning_rate.setter
    def learning_rate(self, value: PyTree) -> None:
        rate = self.learning_rate
        if any(_SCHEDULE in kind for kind in self._kinds):
            raise _no_rate("a schedule computes it at each step, so that a value would be lost.")
        rate.assign(value)

    @override
    def build(self, variables: PyTree) -> None:
        """Creates the variables of the state. The transformation sees the parameters in this structure.

        Args:
          variables: pytree of the variables to train.

        Raises:
          InvalidArgumentError: it is not a pytree of variables, or the transformation fails for them.
          VariableError: the optimizer is built already.
        """
        tree = _Tree.of(variables)
        if self._tree is not None:
            raise self._refuse(tree.variables)
        if any(map(compat.initializer_of, tree.variables)):
            raise VariableError(
                "OptaxOptimizer with a ShardedEmbedding",
                "a step updates only some rows of the table, but a transformation may need all.",
                "keras.optimizers.Adam(); or keras.layers.Embedding",
            )
        shapes, structure = _shapes_of_state(self._transformation, tree)
        super().build(tree.variables)
        paths = [path for path, _ in tree_flatten_with_path(tree.join(tree.variables))[0]]
        places = dict(zip(paths, tree.variables, strict=True))
        owners = [_owner(places, path, leaf.shape) for path, leaf in shapes]

        # The state is divided like the variables, so that no device has a whole one.
        shardings = [None if v is None else compat.layout_of_shards(v) for _, v in owners]

        def leaves(params: Sequence[Any]) -> list[jax.Array]:
            # Copies, because JAX returns equal results as one array, which cannot be donated twice.
            return [jnp.copy(x) for x in jax.tree.leaves(self._transformation.init(tree.join(params)))]

        @functools.cache
        def first_values() -> list[jax.Array]:
            values: list[jax.Array] = jax.jit(leaves, out_shardings=shardings)([v.value for v in tree.variables])
            return values

        def first_value(index: int) -> jax.Array:
            if not any(map(compat.is_hollow, tree.variables)):
                return first_values()[index]

            # Some arrays are never made, so this process makes each of the others alone.
            def make() -> jax.Array:
                return leaves([jnp.zeros(v.shape, compat.dtype_of(v)) for v in tree.variables])[index]

            value: jax.Array = jax.jit(make, out_shardings=shardings[index])()
            return value

        def add(index: int) -> Variable:
            first = FirstValue(functools.partial(first_value, index))
            return compat.add_slot(self, self._kinds[index], first, shapes[index][1], owners[index][1])

        self._kinds = tuple(keystr(path, simple=True, separator="_").replace("/", "_") or "state" for path, _ in owners)
        self._state = tuple(map(add, range(len(owners))))
        self._tree, self._state_structure = tree, structure

    @override
    def apply(self, grads: PyTree, trainable_variables: PyTree = None) -> None:
        """Sums gradients over the replicas and updates the variables. Call it like the `apply` of any Keras optimizer.

        Args:
          grads: pytree of arrays, or of None for a variable that is to keep its value. Its gradient then counts as zeros.
          trainable_variables: pytree of variables with the structure of `grads`: always all variables that the optimizer trains. The first
            call decides about the structure that the transformation sees. None if the optimizer is built.

        Raises:
          InvalidArgumentError: the structures differ, there are no variables, or the transformation fails for them.
          VariableError: the optimizer trains other variables.
        """
        tree = self._tree
        if trainable_variables is not None:
            tree = _Tree.of(trainable_variables)
        elif tree is None:
            raise InvalidArgumentError(
                "OptaxOptimizer.apply(gradients) before the first apply(gradients, variables)",
                "the optimizer does not know its variables.",
                "optimizer.apply(gradients, variables)",
            )
        gradients = tree.flatten(grads, is_ordered=trainable_variables is None)
        if self._tree is None:
            with keras.name_scope(self.name, caller=self):
                self.build(tree.join(tree.variables))
        elif set(map(id, tree.variables)) != set(map(id, self._tree.variables)):
            raise self._refuse(tree.variables)
        super().apply(gradients, tree.variables)

    def _update(self, gradients: Sequence[Any], variables: Sequence[Variable]) -> None:
        tree, by_id = self._tree, dict(zip(map(id, variables), gradients, strict=True))
        assert tree is not None
        params = [v.value for v in tree.variables]
        grads = [
            jnp.zeros_like(p) if by_id.get(id(v)) is None else by_id[id(v)]
            for v, p in zip(tree.variables, params, strict=True)
        ]
        state = jax.tree.unflatten(self._state_structure, [v.value for v in self._state])
        updates, state = self._transformation.update(tree.join(grads), state, tree.join(params))
        for v, param, change in zip(tree.variables, params, jax.tree.leaves(updates), strict=True):
            if id(v) in by_id:
                v.assign((param + change).astype(param.dtype))
        for v, value in zip(self._state, jax.tree.leaves(state), strict=True):
            v.assign(value)

    @override
    def save_own_variables(self, store: PyTree) -> None:
        """Stores the state in a Keras file.

        Raises:
          InvalidArgumentError: the optimizer was built for a pytree. The file has no names, and who loads it builds the optimizer for a list.
        """
        if self._tree is not None and self._tree.structure != jax.tree.structure([0] * len(self._tree.variables)):
            raise InvalidArgumentError(
                f"model.save with an OptaxOptimizer for the pytree {shown(self._tree.structure)}",
                "the file holds the state in the order of model.trainable_variables.",
                "optimizer.build(model.trainable_variables) before the first step; or phalanx.train.Checkpoint(model=model)",
            )
        super().save_own_variables(store)

    @override
    def get_config(self) -> dict[str, Any]:
        """Returns the name only, because functions cannot be written to a file."""
        return {"name": self.name}

    @classmethod
    @override
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Returns an optimizer of a subclass whose constructor makes the transformation.

        Raises:
          InvalidArgumentError: the class is `OptaxOptimizer`, whose transformation is in no file.
        """
        if cls is OptaxOptimizer:
            raise InvalidArgumentError(
                "OptaxOptimizer.from_config, for example to load a .keras file",
                "a file cannot contain the functions of a transformation.",
                "keras.models.load_model(path, compile=False); or before you save, use a registered subclass whose constructor calls "
                "super().__init__(optax.adamw(1e-3), name)",
            )
        return cls(**config)

    def _refuse(self, variables: Sequence[Variable]) -> VariableError:
        assert self._tree is not None
        known, new = ({id(v): v for v in vs} for vs in (self._tree.variables, variables))
        paths = [v.path for key, v in (known | new).items() if not (key in known and key in new)]
        return VariableError(
            f"OptaxOptimizer for {len(new)} variables",
            f"the optimizer was built for {len(known)} variables, and its state fits only these. The difference is {listed(paths) or 'nothing'}.",
            "pass the same variables at each step; a new OptaxOptimizer after a change of `trainable`; "
            "optax.masked(optax.adamw(1e-3), mask) to train some of them",
        )


@dataclass(frozen=True)
class _Tree:
    """The variables of a pytree, and its structure. Not a tuple, in which Keras would find more variables of the optimizer."""

    variables: list[Variable]
    structure: PyTree

    @classmethod
    def of(cls, params: PyTree) -> Self:
        """Flattens a pytree of variables.

        Raises:
          InvalidArgumentError: it has other leaves, none, or one variable twice.
        """
        try:
            variables, structure = jax.tree.flatten(_listed(params))
        except ValueError:  # Of keys that cannot be sorted.
            variables, structure = [params], None
        wrong = [x for x in variables if not isinstance(x, Variable)]
        if wrong or not variables or len(set(map(id, variables))) < len(variables):
            raise InvalidArgumentError(
                f"variables={shown(wrong[0] if wrong else params)}",
                "must be a pytree of variables, with each of them once.",
                "variables = jax.tree.map(phalanx.Variable, params)",
            )
        return cls(variables, structure)

    def join(self, values: Sequence[Any]) -> PyTree:
        """Returns a pytree of values, one per variable."""
        return jax.tree.unflatten(self.structure, values)

    def flatten(self, gradients: PyTree, *, is_ordered: bool) -> list[Any]:
        """Returns one gradient, or None, per variable.

        Args:
          gradients: pytree of gradients.
          is_ordered: whether it may be a flat list in the order of the variables, whatever their structure is.

        Raises:
          InvalidArgumentError: the gradients have another structure.
        """
        flat = [jax.tree.structure(kind([0] * len(self.variables))) for kind in (list, tuple)]
        for structure in [self.structure, *(flat if is_ordered or self.structure in flat else [])]:
            with contextlib.suppress(ValueError, RuntimeError):  # JAX cannot show a deleted array in its error.
                leaves: list[Any] = structure.flatten_up_to(_listed(gradients))
                pairs = [(g, v) for g, v in zip(leaves, self.variables, strict=True) if g is not None]
                if all(jax.tree_util.all_leaves([g]) and np.shape(g) == tuple(v.shape) for g, v in pairs):
                    return leaves
        paths = [keystr(path) for path, _ in tree_flatten_with_path(self.join(self.variables))[0]]
        raise InvalidArgumentError(
            f"OptaxOptimizer.apply(gradients={shown(gradients)})",
            f"must have the structure and the shapes of the variables, which are at {listed(paths)}.",
            "loss, gradients = jax.value_and_grad(loss_of)(jax.tree.map(lambda v: v.value, variables))",
        )


def _listed(tree: PyTree) -> PyTree:
    """Returns a list instead of an iterator, which JAX takes for a leaf."""
    return list(tree) if isinstance(tree, (Iterator, ValuesView)) else tree


def _owner(places: dict[Any, Variable], path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, Variable | None]:
    """Returns the variable that an array of a state belongs to, after the beginning of its path; or None, after the whole path.

    It belongs to a variable if its path ends with the path of the variable, and both have the same shape.
    """
    for i in range(len(path) + 1):
        variable = places.get(path[i:])
        if variable is not None and tuple(variable.shape) == shape:
            return path[:i], variable
    return path, None


def _shapes_of_state(transformation: PyTree, tree: _Tree) -> tuple[list[tuple[Any, Any]], Any]:
    """Returns the paths and shapes of the arrays of a state, and its structure.

    Raises:
      InvalidArgumentError: the transformation fails for the shapes of the variables, or needs more than gradients, or variables cannot
        hold its state.
    """
    params = tree.join([shape_dtype(tuple(v.shape), compat.dtype_of(v)) for v in tree.variables])
    try:
        state = jax.eval_shape(transformation.init, params)
        updates, new = jax.eval_shape(transformation.update, params, state, params)
        shapes, structure = tree_flatten_with_path(state)
        for _, leaf in shapes:
            keras.backend.standardize_dtype(leaf.dtype)
        if (jax.tree.structure(updates), jax.tree.structure(new)) != (tree.structure, structure):
            raise ValueError("its update returns other structures than it gets")
    except (TypeError, ValueError) as e:
        raise InvalidArgumentError(
            f"OptaxOptimizer for {len(tree.variables)} variables",
            f"the transformation fails: {str(e).partition(chr(10))[0][:300]}.",
            "a transformation with the functions init(params) and update(gradients, state, params), such as optax.adamw(1e-3)",
        ) from e
    return shapes, structure


def _no_rate(
    reason: str, hint: str = "OptaxOptimizer(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3))"
) -> InvalidArgumentError:
    return InvalidArgumentError("learning_rate of an OptaxOptimizer", reason, hint)
