"""Weights from a file: `init=FILE` starts from a model that someone already has.

Files are safetensors, or what `torch.save` wrote, read with `weights_only=True` and nothing else: a pickle that asks to
run code is refused and never run. Training scripts wrap state dicts in many ways; here they are unwrapped once.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from hardsphere.errors import HardsphereError
from hardsphere.models.classifier import Classifier
from hardsphere.sphere import final_linear

T = TypeVar("T")

# Where training scripts put the state dict inside a checkpoint.
_NESTS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "params", "weights")
_PREFIXES = ("module.", "model.")
_NAMED = 5  # an error names this many keys of a kind


def read_weights(file: Path) -> dict[str, Tensor]:
    """The state dict in a file, without the wrapping that training scripts put around it."""
    content = _read(Path(file))
    while isinstance(content, Mapping) and not any(isinstance(value, Tensor) for value in content.values()):
        inner = next((content[nest] for nest in _NESTS if isinstance(content.get(nest), Mapping)), None)
        if inner is None:
            break
        content = inner
    tensors = {}
    if isinstance(content, Mapping):
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        held = f"the keys {_few(map(str, content))}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise HardsphereError(f"{file} holds no weights of a model, but {held}: save model.state_dict() instead.")
    return strip_prefixes(tensors)


def load_weights(model: Classifier, file: Path) -> list[str]:
    """Fill a model from a file of a `Classifier` or of its bare network, and return the keys that were left new.

    Everything must fit but the final layer, which may have other classes, and a bias or none.
    """
    weights = read_weights(file)
    whole = {"mean", "std"} <= weights.keys() and any(name.startswith("network.") for name in weights)
    target = model if whole else model.network
    # Names are compared as `strip_prefixes` leaves them, in case it is the model itself that has such a prefix.
    own = strip_prefixes({name: (name, value.shape) for name, value in target.state_dict().items()})
    last = f"{final_linear(target)}."
    final = next(stripped for stripped, (name, _) in own.items() if name == f"{last}weight").removesuffix("weight")

    misshapen = [name for name, (_, shape) in own.items() if name in weights and weights[name].shape != shape]
    if any(name.startswith(final) for name in misshapen):
        weights = {name: value for name, value in weights.items() if not name.startswith(final)}
    new = [name for name in own if name not in weights and not name.endswith(".num_batches_tracked")]
    # The released WRN checkpoints carry a block that their forward pass never used.
    surplus = [name for name in weights if name not in own and not name.startswith("sub_block1.")]
    _check_fit(file, final, {"missing": new, "unexpected": surplus, "of another shape": misshapen})
    target.load_state_dict({own[name][0]: value for name, value in weights.items() if name in own}, strict=False)
    return [("" if whole else "network.") + own[name][0] for name in new]


def strip_prefixes(named: Mapping[str, T]) -> dict[str, T]:
    """Names without what data parallelism, compilation and training scripts put before them.

    A prefix goes only where every name has it: a network may well have one part among others that is called `model`.
    """
    stripped = {name.replace("_orig_mod.", ""): value for name, value in named.items()}  # no one's own name, anywhere
    while prefix := next((p for p in _PREFIXES if stripped and all(name.startswith(p) for name in stripped)), None):
        stripped = {name.removeprefix(prefix): value for name, value in stripped.items()}
    return stripped


def _check_fit(file: Path, final: str, differences: Mapping[str, list[str]]) -> None:
    """Raise unless the file differs from the model in the final layer alone."""
    body = {kind: [name for name in names if not name.startswith(final)] for kind, names in differences.items()}
    if found := [f"{kind}: {_few(names)}" for kind, names in body.items() if names]:
        raise HardsphereError(f"The weights in {file} do not fit the model ({'; '.join(found)}).")


def _read(file: Path) -> Any:
    if not file.is_file():
        raise HardsphereError(f"There is no file of weights at {file}.")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        with warnings.catch_warnings(action="ignore"):  # of what only matters when code may run
            return torch.load(file, map_location="cpu", weights_only=True)
    except PermissionError:
        raise HardsphereError(f"{file} cannot be read: permission denied.") from None
    except pickle.UnpicklingError:
        raise HardsphereError(_refusal(file)) from None
    except Exception:  # an unpickler that walks over damaged bytes stumbles in every way there is
        raise HardsphereError(f"{file} is damaged, or no file of weights at all.") from None


def _refusal(file: Path) -> str:
    """Why a pickle was not read, with what it asked for where that can be told without running it."""
    try:
        wanted = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except (ValueError, RuntimeError):
        wanted = []
    asks = f"asks to run {_few(wanted)}" if wanted else "is damaged, or asks to run code"
    return f"{file} {asks} when it is opened, which is refused: save model.state_dict() alone instead."


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more
