# SPDX-License-Identifier: Apache-2.0
"""`TensorBoard`: the counterpart of Keras's callback, which does not need TensorFlow."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import keras
import numpy as np
from typing_extensions import override

from phalanx import summary
from phalanx._src.programs.values import to_host
from phalanx._src.runtime.bootstrap import is_this_chief
from phalanx._src.tracing.records import defaults, restored
from phalanx._src.typed_jax import block_until_ready
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.keras import projector
from phalanx.keras.programs import steps_per_execution
from phalanx.keras.tracking import ScalarCallback
from phalanx.summary.traces import CalledPrograms
from phalanx.typing import PyTree


@final
class TensorBoard(ScalarCallback):
    """Writes losses, metrics, weights, programs and profiles for TensorBoard. May be created in any context.

    `keras.callbacks.TensorBoard` needs TensorFlow; this callback needs tensorboardX and pillow. The names of the values are the
    same. Only the chief of a cluster writes.

    Args:
      log_dir: folder for the logs. Training writes to its subfolder `train`, validation to `validation`.
      histogram_freq: number of epochs between two histograms of the weights. 0 for none.
      write_graph: whether to write the layers of the model as a graph, and the program of the first step as a text.
      write_images: whether to write weights as images too, with the histograms.
      write_steps_per_second: whether to write the speed, and with several processes the `phalanx.experimental.step_times` of each.
      update_freq: when to write the values of batches, in addition to those of epochs: "epoch" for never, "batch" for every
        batch, or a number of batches. The same batches record what layers give to `phalanx.summary`.
      profile_batch: the number of the batch to profile, counted from 1, or the first and the last number. 0 for none.
      embeddings_freq: number of epochs between two files of the embeddings for TensorBoard's projector. 0 for none.
      embeddings_metadata: path of a TSV file with a label per row of the embeddings, or a dict of such paths by layer name.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value. In `fit`: `embeddings_metadata` names no embedding layer.
      MissingDependencyError: tensorboardX or pillow is not installed.

    Source: keras.callbacks.TensorBoard.

    Example:
      >>> import phalanx
      >>> callbacks = [phalanx.keras.TensorBoard("logs", histogram_freq=1)]
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
        profile_batch: int | str | Sequence[int] = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: str | Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(update_freq, write_steps_per_second)
        self._log_dir = arguments.local_path("log_dir", log_dir)
        summary.create_file_writer(self._log_dir)  # Raises if a library is missing.
        self._histogram_freq = arguments.integer("histogram_freq", histogram_freq, least=0)
        self._embeddings_freq = arguments.integer("embeddings_freq", embeddings_freq, least=0)
        self._writes_graph = arguments.flag("write_graph", write_graph)
        self._writes_images = arguments.flag("write_images", write_images)
        self._profiled, self._metadata = _batches(profile_batch), _metadata(embeddings_metadata)
        self._writers: dict[str, summary.SummaryWriter] = {}
        self._programs: CalledPrograms | None = None
        self._tested = 0
        self._is_profiling = self._awaits_profile = self._awaits_program = False
        self.is_default = False

    @override
    def on_train_begin(self, logs: PyTree = None) -> None:
        """Writes the layers of the model."""
        super().on_train_begin(logs)
        self._tested = 0
        self._awaits_profile = self._profiled is not None and is_this_chief()
        self._awaits_program = self._writes_graph
        if self._embeddings_freq:
            projector.require_known(self._metadata, self.model)
        if self._writes_graph:
            self._write_layers()

    @override
    def on_train_batch_begin(self, batch: int, logs: PyTree = None) -> None:
        """Starts the profile at its first batch, and collects the program of the first step."""
        super().on_train_batch_begin(batch, logs)
        self._record_layers("train", self.batches)
        if self._awaits_program:
            self._programs = CalledPrograms()
        if self._awaits_profile and self._profiled and self.batches + 1 >= self._profiled[0]:
            summary.trace_on(graph=False, profiler=True, profiler_outdir=self._folder("train"))
            self._is_profiling, self._awaits_profile = True, False

    @override
    def on_train_batch_end(self, batch: int, logs: PyTree = None) -> None:
        """Writes values, the program of the first step, and the profile after its last batch."""
        super().on_train_batch_end(batch, logs)
        if self._programs is not None:
            self._write_programs(self._programs)
        if self._is_profiling and self._profiled and self.batches >= self._profiled[1]:
            block_until_ready(logs)  # JAX returns before the step has ended, and the profile would miss the rest.
            self._end_profile()

    @override
    def on_test_batch_begin(self, batch: int, logs: PyTree = None) -> None:
        """Makes the writer of the validation the default."""
        self._record_layers("validation", self._tested)
        self._tested += steps_per_execution(self.model)

    @override
    def on_epoch_end(self, epoch: int, logs: PyTree = None) -> None:
        """Writes values, weights and embeddings of the epoch."""
        super().on_epoch_end(epoch, logs)
        if self._histogram_freq and epoch % self._histogram_freq == 0:
            self._write_weights(epoch)
        if self._embeddings_freq and epoch % self._embeddings_freq == 0:
            layers = projector.embeddings_of(self.model)
            # In all processes, because reading a sharded table is a collective call.
            rows = {layer.name: _on_host(layer.embeddings) for layer in layers}
            if is_this_chief():
                projector.write(self._log_dir, rows, self._metadata)

    def abandon(self) -> None:
        """Stops what a training run that failed has left running."""
        if self._programs is not None:
            self._programs.stop()
        if self._is_profiling:
            summary.trace_off()
        self._programs, self._is_profiling, self._is_training = None, False, False
        self._close()

    @override
    def _target(self, part: str) -> tuple[summary.SummaryWriter, str]:
        return self._writer(part), ""

    @override
    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    @override
    def _end(self) -> None:
        if self._is_profiling:
            self._end_profile()
        self._close()

    def _folder(self, part: str) -> str:
        return os.path.join(self._log_dir, part)

    def _writer(self, part: str) -> summary.SummaryWriter:
        if part not in self._writers:
            self._writers[part] = summary.create_file_writer(self._folder(part))
        return self._writers[part]

    def _close(self) -> None:
        while self._writers:
            self._writers.popitem()[1].close()

    def _record_layers(self, part: str, done: int) -> None:
        """Makes the next step record what layers give to `phalanx.summary`, if its batch is one that is written."""
        if self.is_default and self._every:
            after = done + steps_per_execution(self.model)
            self._writer(part).set_as_default(done + 1)
            # With `steps_per_execution`, one of several batches may be due.
            defaults.condition, defaults.is_traced = after // self._every > done // self._every, False

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        with self._writer("train").as_default(step), summary.record_if(True):
            yield

    def _write_layers(self) -> None:
        """Writes the model as JSON, which TensorBoard shows as a graph of its layers."""
        # An optional library. `create_file_writer` in the constructor has imported it already.
        from tensorboardX.proto.summary_pb2 import SummaryMetadata

        # TensorBoard draws the layers in the JSON, which that of a subclassed model need not have.
        if type(self.model).__name__ not in ("Functional", "Sequential"):
            return
        try:
            model = self.model.to_json()
        except Exception as e:  # Layers have their own code.
            warnings.warn(
                f"TensorBoard shows no graph of {self.model.name!r}, because to_json() failed: {e}", stacklevel=2
            )
            return
        metadata = SummaryMetadata()
        # 1 is the version of the format, as in Keras.
        metadata.plugin_data.plugin_name, metadata.plugin_data.content = "graph_keras_model", b"1"
        with self._writing(0):
            summary.write("keras", model, metadata=metadata)

    def _write_programs(self, programs: CalledPrograms) -> None:
        programs.stop()
        self._programs, self._awaits_program = None, False
        if markdown := programs.as_markdown():
            with self._writing(0):
                summary.text("graph", markdown)

    def _end_profile(self) -> None:
        self._is_profiling = False
        summary.trace_export("profile")

    def _write_weights(self, epoch: int) -> None:
        with self._writing(epoch):
            for weight in (weight for layer in self.model.layers for weight in layer.weights):
                value, name = _on_host(weight), weight.path.replace(":", "_")
                summary.histogram(f"{name}/histogram", value)
                image = _as_images(value) if self._writes_images else None
                if image is not None:
                    summary.image(f"{name}/image", image)


@contextmanager
def writing(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Returns a context in which the `TensorBoard` callbacks among some may set default writers, for summaries of layers.

    At its end the defaults are what they were, and nothing that a callback has started continues.
    """
    boards = [c for c in callbacks if isinstance(c, TensorBoard)]
    with restored():
        for board in boards:
            board.is_default = True
        try:
            yield
        except BaseException:
            for board in boards:
                board.abandon()
            raise
        finally:
            for board in boards:
                board.is_default = False


def _batches(profile_batch: Any) -> tuple[int, int] | None:
    """Returns the first and the last batch to profile, or None."""
    bounds = profile_batch
    # Keras also accepts the text "10,20".
    if isinstance(bounds, str):
        bounds = [int(part) if arguments.is_number(part.strip()) else part for part in bounds.split(",")]
    if not isinstance(bounds, (list, tuple)):
        bounds = [bounds, bounds]
    bounds = [*bounds, *bounds] if len(bounds) == 1 else bounds
    if not all(arguments.is_integer(number, least=0) for number in bounds) or len(bounds) != 2 or bounds[0] > bounds[1]:
        raise InvalidArgumentError(
            f"profile_batch={shown(profile_batch)}",
            "must be the number of a batch, or the first and the last number, or 0.",
            "profile_batch=(10, 20)",
        )
    first, last = map(int, bounds)
    return (first, last) if last else None


def _metadata(paths: Any) -> str | dict[str, str] | None:
    is_dict = isinstance(paths, Mapping) and all(isinstance(text, str) for item in paths.items() for text in item)
    if paths is not None and not isinstance(paths, str) and not is_dict:
        raise InvalidArgumentError(
            f"embeddings_metadata={shown(paths)}",
            "must be a path, or a dict from names of layers to paths.",
            'embeddings_metadata="words.tsv"',
        )
    return dict(paths) if is_dict else paths


def _on_host(weight: Any) -> np.ndarray:
    """Returns a copy of a weight. A collective call, if no process has the whole weight."""
    return to_host(weight.value if isinstance(weight, keras.Variable) else weight)


def _as_images(weight: np.ndarray) -> np.ndarray | None:
    """Returns a weight as images of one channel, or as the images that it is; None for a weight that is neither.

    A kernel of a dense layer has its longer side across. A kernel of a convolution is an image per filter of its last dim.

    Source: keras.callbacks.TensorBoard.
    """
    pixels = np.squeeze(weight)
    if pixels.ndim == 1:
        pixels = pixels[None, :, None, None]
    elif pixels.ndim == 2:
        pixels = (pixels.T if pixels.shape[0] > pixels.shape[1] else pixels)[None, :, :, None]
    elif pixels.ndim == 3:
        is_last = keras.config.image_data_format() == "channels_last"
        pixels = (np.moveaxis(pixels, 2, 0) if is_last else pixels)[..., None]
    return pixels if pixels.ndim == 4 and pixels.shape[-1] in (1, 3, 4) else None
