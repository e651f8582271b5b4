"""A trained model as one self-describing file: weights, architecture, classes, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hardsphere import models
from hardsphere.config import Config, from_dict, to_dict
from hardsphere.data import DataSet
from hardsphere.errors import HardsphereError
from hardsphere.files import write_json
from hardsphere.threat import Ball
from hardsphere.train.tensors import read_tensors, write_tensors

MODEL_FILE = "model.safetensors"


@dataclass(frozen=True)
class Deployed:
    """A model ready for use, in eval mode, with what its file says about it."""

    model: nn.Module
    config: Config
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]
    file: Path
    meta: dict[str, Any]

    @property
    def ball(self) -> Ball:
        """The ball it was trained for."""
        return Ball(self.config.attack.norm, self.config.attack.eps)

    @property
    def data_name(self) -> str:
        return self.config.dataset

    @property
    def data_dir(self) -> Path | None:
        """Where its data lay when it was trained."""
        return Path(self.meta["data_dir"]) if self.meta.get("data_dir") else None

    @property
    def selection(self) -> str:
        """How this checkpoint was chosen, in words."""
        return str(self.meta["selection"])


def build_model(config: Config, data: DataSet) -> models.Classifier:
    """The model of a configuration, freshly initialised from its seed."""
    return _build(config, len(data.class_names), data.shape, data.mean, data.std)


def _build(
    config: Config, num_classes: int, shape: tuple[int, int, int], mean: tuple[float, ...], std: tuple[float, ...]
) -> models.Classifier:
    head = models.HeadSpec(**to_dict(config.head))
    channels, size = shape[0], shape[1]
    return models.build(
        config.model,
        num_classes=num_classes,
        in_channels=channels,
        image_size=size,
        mean=mean,
        std=std,
        head=head,
        seed=config.seed,
    )


def rebuild(description: Mapping[str, Any]) -> models.Classifier:
    """The model that `describe` describes, freshly initialised."""
    shape = tuple(description["shape"])
    mean, std = tuple(description["mean"]), tuple(description["std"])
    return _build(from_dict(description["config"]), len(description["class_names"]), shape, mean, std)


def describe(config: Config, data: DataSet, data_dir: Path | None) -> dict[str, Any]:
    """What a model's file must say so that the model can be built again without its data."""
    return {
        "format": 1,
        "config": to_dict(config),
        "class_names": list(data.class_names),
        "shape": list(data.shape),
        "mean": list(data.mean),
        "std": list(data.std),
        "data_dir": str(data_dir.resolve()) if data_dir else None,
    }


def split_digests(data: DataSet) -> dict[str, str | None]:
    """The fingerprints of the splits: by these it is known later whether the data is still the same."""
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    return {name: None if split is None else split.digest() for name, split in splits.items()}


def save_deployed(directory: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write a model's tensors into a checkpoint directory, with a readable copy of its description beside it."""
    write_tensors(directory / MODEL_FILE, tensors, meta)
    write_json(directory / "meta.json", meta)


def describe_anew(directory: Path, changes: dict[str, Any]) -> None:
    """Change the description of a model in a checkpoint directory."""
    tensors, meta = read_tensors(directory / MODEL_FILE)
    save_deployed(directory, tensors, meta | changes)


def load(path: str | Path) -> Deployed:
    """The model of a run directory (its best checkpoint), of a checkpoint directory, or of a ``.safetensors`` file."""
    file = _model_file(Path(path))
    tensors, meta = read_tensors(file)
    try:
        model, config = rebuild(meta), from_dict(meta["config"])
        names, shape = tuple(meta["class_names"]), tuple(meta["shape"])
    except KeyError as missing:
        raise HardsphereError(f"'{file}' holds no deployed model: its description lacks {missing}.") from None
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise HardsphereError(f"'{file}' does not fit the model it describes: {detail}") from None
    return Deployed(model.eval(), config, names, shape, file, meta)


def _model_file(path: Path) -> Path:
    if path.is_file():
        return path
    candidates = [path / MODEL_FILE, *(path / "checkpoints" / name / MODEL_FILE for name in ("best", "last"))]
    for file in candidates:
        if file.is_file():
            return file
    if not path.exists():
        raise HardsphereError(f"There is no run directory or model file '{path}'.")
    raise HardsphereError(f"'{path}' holds no trained model: no {MODEL_FILE} in it nor under checkpoints/.")
