"""Models of KerasHub, small and with random weights, train under strategies as in plain Keras on one device: `make test-hub`.

Two processes import this module as the tasks of a worker.
"""

import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import phalanx

models = pytest.importorskip("keras_hub.models", reason="KerasHub is not installed: make test-hub")
samplers = pytest.importorskip("keras_hub.samplers")

ROWS, BATCH, EPOCHS = 55, 16, 2
"""The last batch of an epoch has seven rows, which two replicas cannot share equally."""

WORDS, LENGTH, WIDTH, KINDS, IGNORED = 64, 12, 64, 3, -100
RANDOM = np.random.default_rng(3)
LENGTHS = RANDOM.integers(3, LENGTH + 1, (ROWS, 1))
PLACES = np.tile(np.arange(LENGTH), (ROWS, 1))
IS_WORD = PLACES < LENGTHS
TOKENS = np.where(IS_WORD, RANDOM.integers(1, WORDS, (ROWS, LENGTH)), 0).astype("int32")
TEXT = {"token_ids": TOKENS, "padding_mask": IS_WORD.astype("int32")}
PAIRS = {**TEXT, "segment_ids": (PLACES >= LENGTHS // 2).astype("int32")}
HAS_NEXT = PLACES + 1 < LENGTHS
NEXT = np.where(HAS_NEXT, np.roll(TOKENS, -1, 1), IGNORED).astype("int32")
MASKED = np.sort(RANDOM.permuted(PLACES, axis=1)[:, :4], axis=1).astype("int32")
HIDDEN = np.take_along_axis(np.where(IS_WORD, TOKENS, IGNORED), MASKED, 1)
IMAGES = RANDOM.normal(size=(ROWS, 8, 8, 3)).astype("float32")
KIND = RANDOM.integers(0, KINDS, ROWS).astype("int32")

ENCODER = {"num_layers": 2, "hidden_dim": WIDTH, "num_heads": 4}
WORD_ENCODER = {**ENCODER, "vocabulary_size": WORDS, "intermediate_dim": 96, "dropout": 0.0}
DECODER = {
    "num_layers": 2,
    "hidden_dim": WIDTH,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "vocabulary_size": WORDS,
    "intermediate_dim": 96,
}
LLAMA_3 = {
    "tie_word_embeddings": True,
    "rope_frequency_adjustment_factor": 32.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_pretraining_sequence_length": 8,
}
GEMMA_2 = {
    "head_dim": 16,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "attention_logit_soft_cap": 50,
    "final_logit_soft_cap": 30,
    "use_sliding_window_attention": True,
    "sliding_window_size": 4,
}
# Without the loss that balances the experts: it is a product of means over the rows of a replica, so it depends on how many there are.
EXPERTS = {"num_experts": 4, "top_k": 2, "sliding_window": 4, "router_aux_loss_coef": 0.0}


def decoder(name: str, rank: int = 0, **options: Any) -> keras.Model:
    """A model that predicts the next word; with a rank, only LoRA's matrices of it learn."""
    backbone = getattr(models, f"{name}Backbone")(**DECODER, **options)
    if rank:
        backbone.enable_lora(rank)
    return getattr(models, f"{name}CausalLM")(backbone=backbone, preprocessor=None)


def bert() -> keras.Model:
    return models.BertBackbone(**WORD_ENCODER, max_sequence_length=LENGTH)


def vit() -> keras.Model:
    return models.ViTBackbone(**ENCODER, mlp_dim=96, image_shape=(8, 8, 3), patch_size=4)


def of_words() -> dict[str, Any]:
    """A loss, and a metric with the weights of the rows, of the words that are not ignored."""
    options = {"from_logits": True, "ignore_class": IGNORED}
    return {
        "loss": keras.losses.SparseCategoricalCrossentropy(**options),
        "weighted_metrics": [keras.metrics.SparseCategoricalCrossentropy(**options)],
    }


@dataclass(frozen=True)
class Case:
    """A model, the arguments with which it is compiled (KerasHub's own, if there are none), and its rows."""

    model: Callable[[], keras.Model]
    rows: tuple[Any, ...]
    arguments: Callable[[], dict[str, Any]] = dict


CASES = {
    "llama": Case(functools.partial(decoder, "Llama"), (TEXT, NEXT), of_words),
    "llama3": Case(functools.partial(decoder, "Llama3", **LLAMA_3), (TEXT, NEXT, HAS_NEXT * 0.5), of_words),
    "lora": Case(functools.partial(decoder, "Llama3", rank=4, **LLAMA_3), (TEXT, NEXT), of_words),
    "gemma": Case(functools.partial(decoder, "Gemma", **GEMMA_2), (TEXT, np.maximum(NEXT, 0), HAS_NEXT * 1.0)),
    "mixtral": Case(functools.partial(decoder, "Mixtral", **EXPERTS), (TEXT, NEXT), of_words),
    "bert": Case(lambda: models.BertTextClassifier(bert(), KINDS, dropout=0.0), (PAIRS, KIND)),
    "masked": Case(lambda: models.BertMaskedLM(bert()), ({**PAIRS, "mask_positions": MASKED}, HIDDEN), of_words),
    "vit": Case(lambda: models.ViTImageClassifier(vit(), KINDS), (IMAGES, KIND)),
}


def compiled(strategy: phalanx.Strategy | None, name: str) -> keras.Model:
    """Makes the model of a case under a strategy, or in plain Keras."""
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = CASES[name].model()
        # Some true gradients are zero, as those of key biases. Adam's usual epsilon would divide noise by noise.
        model.compile(keras.optimizers.AdamW(1e-2, epsilon=1e-3), **CASES[name].arguments())
    return model


def train(strategy: phalanx.Strategy | None, name: str) -> dict[str, Any]:
    """Fits a model; returns its history and its weights, and whether some of these are divided among devices."""
    model = compiled(strategy, name)
    given = dict(zip(("x", "y", "sample_weight"), CASES[name].rows, strict=False))
    history = model.fit(**given, batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False).history
    is_divided = any(not v.value.sharding.is_fully_replicated for v in model.weights)
    return {"history": history, "weights": {v.path: v.numpy() for v in model.weights}, "is_divided": is_divided}


@functools.cache
def train_on_one_device(name: str) -> dict[str, Any]:
    return train(None, name)


def devices(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


def over_model_axis(name: str) -> phalanx.Strategy:
    """Two replicas of two devices, with the layout map of KerasHub if the model has one."""
    layout: Any = phalanx.fully_sharded("model")
    backbone = {"llama": models.LlamaBackbone, "lora": models.Llama3Backbone, "gemma": models.GemmaBackbone}.get(name)
    if backbone is not None:
        mesh = keras.distribution.DeviceMesh((2, 2), ("replica", "model"), keras.distribution.list_devices()[:4])
        layout = backbone.get_layout_map(mesh, data_parallel_dim_name="replica")
    return phalanx.MirroredStrategy(devices(4), model_axis=("model", 2), layout=layout)


STRATEGIES = {
    "replicas": lambda _: phalanx.MirroredStrategy(devices(2)),
    "fully_sharded": lambda _: phalanx.MirroredStrategy(devices(2), layout=phalanx.fully_sharded()),
    "model_axis": over_model_axis,
}


def assert_equals_one_device(got: dict[str, Any], name: str) -> None:
    """The losses and the weights are equal within 1e-5, of weights that have moved by a thousand times as much."""
    wanted = train_on_one_device(name)
    assert got["history"].keys() == wanted["history"].keys()
    for metric, values in wanted["history"].items():
        np.testing.assert_allclose(got["history"][metric], values, rtol=0, atol=1e-5, err_msg=metric)
    for (path, value), expected in zip(got["weights"].items(), wanted["weights"].values(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_fit_equals_one_device(name, strategy):
    """Words that are padded or ignored, and a short batch, count as on one device."""
    got = train(STRATEGIES[strategy](name), name)
    assert got["is_divided"] == (strategy != "replicas")
    assert_equals_one_device(got, name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_base_has_no_slots(strategy):
    """The optimizer has two slots for each of LoRA's matrices, and none for the sharded base."""
    model = compiled(STRATEGIES[strategy]("lora"), "lora")
    model.optimizer.build(model.trainable_variables)
    slots = [v.shape for v in model.optimizer.variables if v.shape]
    assert all("lora_kernel" in v.path for v in model.trainable_variables)
    assert sorted(slots) == sorted(2 * [v.shape for v in model.trainable_variables])


@pytest.fixture(scope="module")
def workers():
    """Two processes of one device each."""
    from cluster import Cluster

    with Cluster(2, 1, tasks="test_models") as cluster:
        cluster.wait_until_ready()
        yield cluster


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one_device(name, workers):
    """Each of them reads its rows of what KerasHub makes of the arrays."""
    for got in workers.call("train", deadline_s=900, name=name):
        assert isinstance(got, dict), got
        assert_equals_one_device(got, name)


def generate(strategy: phalanx.Strategy | None, name: str) -> list[np.ndarray]:
    """Goes on with the first words of five rows, in the scope of a strategy and outside of it."""
    model = compiled(strategy, name)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        inside = generated(model)
    return [inside, generated(model)]


def generated(model: keras.Model) -> np.ndarray:
    """The words of five rows after the first three, drawn from the likeliest."""
    model.compile(sampler=samplers.TopKSampler(k=5, seed=3))
    prompts = {"token_ids": TOKENS[:5], "padding_mask": (PLACES[:5] < 3).astype("int32")}
    return model.generate(prompts, stop_token_ids=None)["token_ids"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generate_equals_one_device(strategy):
    """The rows are not as many as the devices could share."""
    np.testing.assert_array_equal(generate(STRATEGIES[strategy]("llama"), "llama"), generate(None, "llama"))


def test_generate_in_two_processes(workers):
    """Each of them gets all rows."""
    wanted = generate(None, "llama")
    for got in workers.call("generate", deadline_s=900, name="llama"):
        assert isinstance(got, list), got
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_presets_load_under_strategies(strategy, tmp_path):
    """A preset of a divided model is that of a whole one, and the other way round."""
    whole, made = compiled(None, "llama"), STRATEGIES[strategy]("llama")
    whole.save_to_preset(tmp_path / "whole")
    with made.scope():
        divided = models.CausalLM.from_preset(str(tmp_path / "whole"), preprocessor=None)
    divided.save_to_preset(tmp_path / "divided")
    again = models.CausalLM.from_preset(str(tmp_path / "divided"), preprocessor=None)
    for model in (divided, again):
        for variable, expected in zip(model.weights, whole.weights, strict=True):
            np.testing.assert_array_equal(variable.numpy(), expected.numpy(), err_msg=variable.path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_safetensors_of_several_files_load_under_strategies(strategy, tmp_path):
    """A folder as on the Hugging Face Hub, with an index of its files, loads into shards."""
    pytest.importorskip("sentencepiece", reason="the environment is old: rm -rf .venv-hub; make test-hub")
    whole, index = models.Llama3Backbone(**DECODER, **LLAMA_3), {}
    whole.export_to_transformers(str(tmp_path))
    arrays = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for name, chosen in (("a.safetensors", sorted(arrays)[::2]), ("b.safetensors", sorted(arrays)[1::2])):
        save_file({key: arrays[key] for key in chosen}, tmp_path / name)
        index |= dict.fromkeys(chosen, name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with STRATEGIES[strategy]("lora").scope():
        divided = models.Llama3Backbone.from_preset(str(tmp_path))
    kernel = divided.get_layer("transformer_layer_0").weights[0]
    assert kernel.value.sharding.is_fully_replicated == (strategy == "replicas")
    for variable, expected in zip(divided.weights, whole.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected.numpy(), err_msg=variable.path)


def test_lora_weights_load_under_strategies(tmp_path):
    """Those of one device go on where they were."""
    made, path = STRATEGIES["model_axis"]("lora"), str(tmp_path / "words.lora.h5")
    whole, divided = compiled(None, "lora"), compiled(made, "lora")
    for variable in whole.trainable_variables:
        variable.assign(variable + 1)
    whole.backbone.save_lora_weights(path)
    divided.backbone.load_lora_weights(path)
    for variable, expected in zip(divided.weights, whole.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected.numpy(), err_msg=variable.path)
