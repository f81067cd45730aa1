"""The checkpoint code of TensorFlow's guides and tutorials, with the imports changed."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx import train


class Net(keras.Model):
    """The guide's model: one layer."""

    def __init__(self):
        super().__init__()
        self.l1 = keras.layers.Dense(5)

    def call(self, x):
        """Applies the layer."""
        return self.l1(x)


def toy_dataset():
    """The guide's data: ten rows, again and again, two at a time."""
    inputs = np.arange(10.0, dtype="float32")[:, None]
    rows = {"x": inputs, "y": inputs * 5.0 + np.arange(5.0, dtype="float32")[None, :]}
    pairs = [{name: values[i : i + 2] for name, values in rows.items()} for i in range(0, 10, 2)]
    return pairs * 40


@phalanx.function
def train_step(net, example, optimizer):
    """The guide's step."""
    with phalanx.GradientTape() as tape:
        loss = keras.ops.mean(keras.ops.abs(net(example["x"]) - example["y"]))
    variables = net.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss


class Training:
    """The objects of the guide's training, created by each start of the program."""

    def __init__(self, folder):
        keras.utils.set_random_seed(7)
        self.opt, self.net = keras.optimizers.Adam(0.1), Net()
        self.iterator = iter(phalanx.get_strategy().experimental_distribute_dataset(toy_dataset()))
        self.ckpt = train.Checkpoint(step=phalanx.Variable(1), optimizer=self.opt, net=self.net, iterator=self.iterator)
        self.manager = train.CheckpointManager(self.ckpt, folder, max_to_keep=3)

    def train_and_checkpoint(self, steps=50):
        """Fifty steps, from the newest checkpoint on, with a save after every ten. Returns their losses."""
        self.ckpt.restore(self.manager.latest_checkpoint)
        losses = []
        for _ in range(steps):
            losses.append(float(train_step(self.net, next(self.iterator), self.opt)))
            self.ckpt.step.assign_add(1)
            if int(self.ckpt.step) % 10 == 0:
                self.manager.save()
        self.manager.sync()
        return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder and the losses of two starts of the guide's program."""
    folder = tmp_path_factory.mktemp("tf_ckpts")
    return folder, Training(folder).train_and_checkpoint(), Training(folder).train_and_checkpoint()


def test_second_start_goes_on_where_the_first_saved(trained, tmp_path):
    """The guide's program, started twice, has the losses of one program that runs on: from step 50, the last that was saved."""
    _, first, second = trained
    whole = Training(tmp_path).train_and_checkpoint(99)
    np.testing.assert_array_equal(first, whole[:50])
    # The counter begins with 1, so 49 steps are in the last checkpoint.
    np.testing.assert_array_equal(second, whole[49:])


def test_manager_keeps_three(trained):
    """The newest three are left, and numbered by the saves of both starts."""
    folder, _, _ = trained
    names = [f"ckpt-{number}" for number in (8, 9, 10)]
    manager = Training(folder).manager
    assert [path.rpartition("/")[2] for path in manager.checkpoints] == names
    assert manager.latest_checkpoint == train.latest_checkpoint(folder) == manager.checkpoints[-1]


def test_parts_are_restored_when_they_are_made(trained):
    """A part of the objects is restored with other objects around it, and one that comes later at once."""
    folder, _, _ = trained
    bias = phalanx.Variable(np.zeros(5, "float32"))
    fake_layer = train.Checkpoint(bias=bias)
    new_root = train.Checkpoint(net=train.Checkpoint(l1=fake_layer))
    status = new_root.restore(train.latest_checkpoint(folder))
    assert np.abs(bias.numpy()).max() > 0.1
    status.assert_existing_objects_matched()
    with pytest.raises(AssertionError):
        status.assert_consumed()
    kernel = phalanx.Variable(np.zeros((1, 5), "float32"))
    fake_layer.kernel = kernel
    assert np.abs(kernel.numpy()).max() > 0.1


def test_inspecting_a_checkpoint(trained):
    """A reader knows names, shapes and dtypes, and reads a value."""
    folder, _, _ = trained
    reader = train.load_checkpoint(folder)
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    assert (list(shapes["net/l1/kernel"]), dtypes["net/l1/kernel"]) == ([1, 5], np.float32)
    assert reader.get_tensor("net/l1/kernel").shape == (1, 5)
    assert "step" in dict(train.list_variables(train.latest_checkpoint(folder)))


def test_lists_and_dicts(tmp_path):
    """A variable that a list and a dict share is saved once, and restored by either."""
    save = train.Checkpoint()
    save.listed = [phalanx.Variable(1.0)]
    save.listed.append(phalanx.Variable(2.0))
    save.mapped = {"one": save.listed[0]}
    save.mapped["two"] = save.listed[1]
    save_path = save.save(tmp_path / "list_example")
    restore = train.Checkpoint()
    second = phalanx.Variable(0.0)
    restore.mapped = {"two": second}
    status = restore.restore(save_path)
    assert second.numpy() == 2.0
    restore.listed = []
    first = phalanx.Variable(0.0)
    restore.listed.append(first)
    # tf.train restores within `append`, because it replaces the list by one of its own.
    status.assert_existing_objects_matched()
    assert first.numpy() == 1.0


def test_custom_training_tutorial(tmp_path):
    """Trained and saved under a strategy; restored and evaluated without one."""
    strategy = phalanx.MirroredStrategy(devices=["cpu:0", "cpu:1"])
    rows = np.random.RandomState(0).normal(size=(40, 3)).astype("float32")
    labels = (rows.sum(1) > 0).astype("int32")

    def create_model():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])

    with strategy.scope():
        model = create_model()
        optimizer = keras.optimizers.Adam(learning_rate=0.01)
        checkpoint = train.Checkpoint(optimizer=optimizer, model=model)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    @phalanx.function
    def distributed_train_step(inputs):
        def replica_step(inputs):
            images, labels = inputs
            with phalanx.GradientTape() as tape:
                per_example = loss_object(labels, model(images, training=True))
                loss = phalanx.nn.compute_average_loss(per_example)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce(phalanx.ReduceOp.SUM, strategy.run(replica_step, args=(inputs,)), axis=None)

    train_dist_dataset = strategy.experimental_distribute_dataset((rows, labels), batch_size=10)
    for epoch in range(4):
        for x in train_dist_dataset:
            distributed_train_step(x)
        if epoch % 2 == 0:
            checkpoint.save(tmp_path / "ckpt")

    eval_accuracy = keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
    new_model, new_optimizer = create_model(), keras.optimizers.Adam()
    checkpoint = train.Checkpoint(optimizer=new_optimizer, model=new_model)
    checkpoint.restore(train.latest_checkpoint(tmp_path)).assert_existing_objects_matched()
    eval_accuracy(labels, new_model(rows, training=False))
    assert float(eval_accuracy.result()) > 0.6
    # Three epochs of four steps are in the second checkpoint.
    new_optimizer.build(new_model.trainable_variables)
    assert int(new_optimizer.iterations) == 12


def test_two_models_and_two_optimizers(tmp_path):
    """DCGAN and pix2pix save generator and discriminator with their optimizers, and restore the newest before they generate."""

    def objects():
        generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        discriminator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        generator_optimizer, discriminator_optimizer = keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-4)
        return generator, train.Checkpoint(
            generator_optimizer=generator_optimizer,
            discriminator_optimizer=discriminator_optimizer,
            generator=generator,
            discriminator=discriminator,
        )

    generator, checkpoint = objects()
    checkpoint.save(file_prefix=str(tmp_path / "ckpt"))
    other, restored = objects()
    restored.restore(train.latest_checkpoint(str(tmp_path)))
    noise = np.ones((4, 2), "float32")
    np.testing.assert_array_equal(other(noise), generator(noise))
