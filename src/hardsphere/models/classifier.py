"""The classifier: pixels in [0, 1] go in, logits come out.

Normalisation is part of the model, so that `eps` means pixels everywhere and no one has to remember which mean and
standard deviation a checkpoint was trained with: they are buffers and travel with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from hardsphere.errors import HardsphereError
from hardsphere.sphere import final_linear


class Classifier(nn.Module):
    """A network behind its input normalisation: what is trained, saved and evaluated.

    Args:
        network: maps normalised images to logits.
        mean: mean of each channel, in pixel units; one number serves all channels.
        std: standard deviation of each channel, above 0.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", _per_channel("mean", mean))
        self.register_buffer("std", _per_channel("std", std))
        if not bool((self.std > 0).all()):
            raise HardsphereError(f"std is {self.std.flatten().tolist()}, but each channel needs a number above 0.")

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.network((x - self.mean) / self.std))


def features(model: nn.Module, x: Tensor) -> Tensor:
    """The penultimate feature z of each image: what the final layer of the model is given."""
    model = getattr(model, "_orig_mod", model)  # a compiled model would not call the hook
    name = final_linear(model)
    caught: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    try:
        model(x)
    finally:
        handle.remove()
    if not caught:
        raise HardsphereError(f"{type(model).__name__} never calls its layer '{name}', so it shows no features there.")
    return caught[-1]


def _per_channel(what: str, values: Sequence[float] | Tensor) -> Tensor:
    # On the CPU even where a model is laid out on the meta device: these are known numbers, not weights to fill in.
    numbers = torch.as_tensor(values, dtype=torch.float32, device=None if isinstance(values, Tensor) else "cpu")
    if numbers.numel() == 0 or not bool(numbers.isfinite().all()):
        raise HardsphereError(f"{what} is {list(values)}, but it needs one finite number per channel.")
    return numbers.clone().view(1, -1, 1, 1)
