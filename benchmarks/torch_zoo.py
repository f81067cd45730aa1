# SPDX-License-Identifier: Apache-2.0
"""Models of `benchmarks.zoo` in torch, with the weights of Keras. In an environment of its own.

Two models are missing. The bidirectional LSTM masks steps in the middle of a sequence, which torch cannot skip. The U-Net would be long,
because torch pads strided poolings and convolutions differently.
"""

from collections.abc import Callable, Iterator
from itertools import islice, pairwise

import numpy as np
import torch
from torch import Tensor, nn

_EPSILON = 1e-3
"""The epsilon of Keras's normalizations."""


class _Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


class _Residual(nn.Sequential):
    """Adds the input to the output of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class _ResidualBlock(nn.Module):
    """A block of the ResNet, with its layers in the order of Keras."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        strides = 1 if inputs == outputs else 2
        self.before = _normalized(inputs)
        # Keras pads strided convolutions only at the end of each dimension.
        padding = [nn.ZeroPad2d((0, 1, 0, 1))] if strides == 2 else []
        convolution = nn.Conv2d(inputs, outputs, 3, strides, padding=2 - strides, bias=False)
        self.layers = nn.Sequential(*padding, convolution, _normalized(outputs))
        self.short = nn.Conv2d(inputs, outputs, 1, strides, bias=False) if inputs != outputs else None
        self.last = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        return (self.short(y) if self.short else x) + self.last(self.layers(y))


class _SelfAttention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self._attention(x, x, x, need_weights=False)[0]


class _WideAndDeep(nn.Module):
    """Two tables, one of which a stack of layers reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide = nn.Embedding(50_000, 16), nn.Embedding(50_000, 1)
        self.deep = nn.Sequential(nn.Linear(8 * 16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.last = nn.Linear(8 + 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.wide(x).flatten(1), self.deep(self.table(x).flatten(1))], 1))


def _normalized(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(channels, _EPSILON, momentum=0.01), nn.ReLU())


def _convnet() -> nn.Module:
    return nn.Sequential(
        _from_keras(),
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        _Apply(lambda x: x.permute(0, 2, 3, 1).flatten(1)),
        nn.Linear(5 * 5 * 64, 10),
    )


def _resnet() -> nn.Module:
    blocks = [_ResidualBlock(inputs, outputs) for inputs, outputs in pairwise((16, 16, 16, 32, 32, 64, 64))]
    last = [_normalized(64), _mean(2, 3), nn.Linear(64, 10)]
    return nn.Sequential(_from_keras(), nn.Conv2d(3, 16, 3, padding=1, bias=False), *blocks, *last)


def _transformer() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(2000, 64),
        *(_Residual(_SelfAttention(64, 4)), nn.LayerNorm(64, _EPSILON)),
        *(_Residual(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), nn.LayerNorm(64, _EPSILON)),
        *(_mean(1), nn.Linear(64, 10)),
    )


def _lstm() -> nn.Module:
    return nn.Sequential(nn.Embedding(2000, 64), nn.LSTM(64, 64, batch_first=True), _last_step(), nn.Linear(64, 10))


def _gru() -> nn.Module:
    first, second = nn.GRU(16, 64, batch_first=True), nn.GRU(64, 64, batch_first=True)
    return nn.Sequential(first, _Apply(lambda result: result[0]), second, _last_step(), nn.Linear(64, 10))


def _autoencoder() -> nn.Module:
    down = [layer for inputs in (1, 32) for layer in (nn.Conv2d(inputs, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))]
    up = [
        layer
        for _ in range(2)
        for layer in (nn.ConvTranspose2d(32, 32, 3, 2), _Apply(lambda x: x[..., :-1, :-1]), nn.ReLU())
    ]
    return nn.Sequential(_from_keras(), *down, *up, nn.Conv2d(32, 10, 3, padding=1), _mean(2, 3))


def _mixer() -> nn.Module:
    def mixing(width: int) -> tuple[nn.Module, ...]:
        return nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64)

    transposed = _Apply(lambda x: x.mT)
    blocks = [
        block
        for _ in range(4)
        for block in (
            _Residual(nn.LayerNorm(64, _EPSILON), transposed, *mixing(128), transposed),
            _Residual(nn.LayerNorm(64, _EPSILON), *mixing(256)),
        )
    ]
    patches = [_from_keras(), nn.Conv2d(3, 64, 4, 4), _Apply(lambda x: x.flatten(2).mT)]
    return nn.Sequential(*patches, *blocks, _mean(1), nn.Linear(64, 10))


def _from_keras() -> nn.Module:
    """Moves the channels of images forward. In memory they stay last, which oneDNN prefers."""
    return _Apply(lambda x: x.permute(0, 3, 1, 2))


def _last_step() -> nn.Module:
    return _Apply(lambda result: result[0][:, -1])


def _mean(*dims: int) -> nn.Module:
    return _Apply(lambda x: x.mean(dims))


_ZOO = {
    "convnet": _convnet,
    "resnet": _resnet,
    "text transformer": _transformer,
    "LSTM": _lstm,
    "GRU": _gru,
    "autoencoder": _autoencoder,
    "MLP-mixer": _mixer,
    "wide and deep": _WideAndDeep,
}


@torch.no_grad()
def model(case: str, weights: str) -> nn.Module:
    """Returns a model that begins with the weights in the file `weights`, which `phalanx_fit.save_weights` wrote."""
    new = _ZOO[case]()
    arrays = map(torch.from_numpy, np.load(weights).values())
    for layer in new.modules():
        for parameter, value in zip(layer.parameters(recurse=False), _converted(layer, arrays), strict=True):
            parameter.copy_(value)
    if next(arrays, None) is not None:
        raise AssertionError(f"the model of Keras for {case!r} has more weights than that of torch")
    return new.to(memory_format=torch.channels_last)


def _converted(layer: nn.Module, arrays: Iterator[Tensor]) -> list[Tensor]:
    """Takes the weights of a layer from `arrays`, and returns its parameters."""
    match layer:
        case nn.Linear():
            return [next(arrays).flatten(0, -2).T, next(arrays)]
        case nn.Conv2d() | nn.ConvTranspose2d():
            kernel, *vectors = (next(arrays) for _ in layer.parameters())
            return [kernel.permute(3, 2, 0, 1), *vectors]
        case nn.BatchNorm2d():
            return list(islice(arrays, 4))[:2]
        case nn.MultiheadAttention():
            projections = list(islice(arrays, 6))
            kernels, vectors = projections[::2], projections[1::2]
            return [torch.cat([x.flatten(1).T for x in kernels]), torch.cat([x.flatten() for x in vectors])]
        case nn.LSTM():
            # torch has two biases, which would both move by the learning rate.
            layer.bias_hh_l0.requires_grad_(False)
            kernel, recurrent, bias = islice(arrays, 3)
            return [kernel.T, recurrent.T, bias, torch.zeros_like(bias)]
        case nn.GRU():
            kernel, recurrent, biases = map(_reset_first, islice(arrays, 3))
            return [kernel.T, recurrent.T, *biases]
    return [next(arrays) for _ in layer.parameters(recurse=False)]


def _reset_first(weight: Tensor) -> Tensor:
    """Returns a weight of a GRU with its gates in the order of torch: reset before update."""
    update, reset, state = weight.chunk(3, -1)
    return torch.cat([reset, update, state], -1)
