"""Checkpoints of a graph."""

import keras
from one_weight import made, model_fn, rows

import phalanx
import phalanx.estimator as estimator
from phalanx.train import load_checkpoint


def test_checkpoint_of_one_step_is_saved_once(tmp_path):
    """A training that goes on from a checkpoint does not write it again."""
    model = made(tmp_path, save_checkpoints_steps=2).train(rows(2))
    before = (tmp_path / "model.ckpt-2.safetensors").stat().st_mtime_ns
    model.train(rows(1))
    assert (tmp_path / "model.ckpt-2.safetensors").stat().st_mtime_ns == before
    assert model.latest_checkpoint() == str(tmp_path / "model.ckpt-3")


def test_objects_of_a_scaffold_are_saved_by_attributes(tmp_path):
    """As in the guide, a model function saves its objects instead of names; a training goes on from there."""

    def fn(features, labels, mode):
        spec = model_fn(features, labels, mode)
        graph_weight = keras.Variable(7.0, name="other", trainable=False)
        saver = phalanx.train.Checkpoint(step=estimator.get_global_step(), part=graph_weight)
        update = [spec.train_op, lambda: graph_weight.assign_add(1.0)]
        return estimator.EstimatorSpec(mode, loss=spec.loss, train_op=update, scaffold=estimator.Scaffold(saver))

    made(tmp_path, fn).train(rows(2))
    made(tmp_path, fn).train(rows(1))
    reader = load_checkpoint(tmp_path / "model.ckpt-3")
    values = sorted(float(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map() if "save" not in name)
    assert values == [3, 10]
