"""Weights in and out: round trips, other people's wrappings, and files that are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hardsphere.errors import HardsphereError
from hardsphere.models import Classifier, HeadSpec, build, load_weights, read_weights
from hardsphere.models.weights import strip_prefixes

HE = HeadSpec(feature_norm=True, weight_norm=True)


def small(seed: int = 0, name: str = "cnn-2", classes: int = 3, head: HeadSpec = HeadSpec()) -> Classifier:  # noqa: B008
    return build(name, num_classes=classes, mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7], head=head, seed=seed).eval()


def save_safetensors(state: dict[str, Tensor], folder: Path) -> Path:
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def save_zip(state: object, folder: Path) -> Path:
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def save_legacy(state: object, folder: Path) -> Path:
    torch.save(state, folder / "weights.pth", _use_new_zipfile_serialization=False)
    return folder / "weights.pth"


SAVERS = [save_safetensors, save_zip, save_legacy]


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, value), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("name", ["cnn-2", "preactresnet18-2", "wrn-10-1"])
def test_round_trip_of_a_classifier(name: str, save: Callable[..., Path], tmp_path: Path) -> None:
    model = small(0, name)
    model.train()(torch.rand(4, 3, 8, 8))  # moves the statistics of the batch normalisation
    other = build(name, num_classes=3, seed=1)
    assert load_weights(other, save(model.state_dict(), tmp_path)) == []
    assert_same(model, other)  # the mean and the standard deviation too
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(model.eval()(x), other.eval()(x))


@pytest.mark.parametrize("save", SAVERS)
def test_a_bare_network_keeps_the_normalisation_of_the_model(save: Callable[..., Path], tmp_path: Path) -> None:
    model, other = small(0), build("cnn-2", num_classes=3, seed=1)
    assert load_weights(other, save(model.network.state_dict(), tmp_path)) == []
    assert_same(model.network, other.network)
    assert other.mean.eq(0).all()


WRAPPINGS: list[Callable[[dict[str, Tensor]], object]] = [
    lambda state: {"state_dict": state, "epoch": 3, "best": 0.5},
    lambda state: {"net": state, "acc": 90.0},
    lambda state: {"model": {"state_dict": state}},
    lambda state: {"optimizer": {"lr": 0.1}, "model_state_dict": state},
    lambda state: {f"module.{name}": value for name, value in state.items()},
    lambda state: {"state_dict": {f"module.model.{name}": value for name, value in state.items()}},
    lambda state: {f"_orig_mod.module.{name}": value for name, value in state.items()},
    lambda state: {f"module._orig_mod.{name}": value for name, value in state.items()},
    lambda state: {name.replace("body.", "body._orig_mod."): value for name, value in state.items()},
    lambda state: {name: value for name, value in state.items() if "num_batches_tracked" not in name},
    lambda state: {name: value.half() if value.is_floating_point() else value for name, value in state.items()},
]


@pytest.mark.parametrize("wrap", WRAPPINGS)
@pytest.mark.parametrize("whole", [True, False])
def test_wrappings_of_training_scripts(
    whole: bool, wrap: Callable[[dict[str, Tensor]], object], tmp_path: Path
) -> None:
    model, other = small(0), small(1)
    state = model.state_dict() if whole else model.network.state_dict()
    assert load_weights(other, save_zip(wrap(state), tmp_path)) == []
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(other(x), model(x), rtol=0.02, atol=0.02)  # one of them is in half precision


def test_prefixes_go_only_where_all_names_have_them() -> None:
    assert list(strip_prefixes({"module.a": 1, "module.b": 2})) == ["a", "b"]
    assert list(strip_prefixes({"model.a": 1, "head.b": 2})) == ["model.a", "head.b"]
    assert list(strip_prefixes({"module.model.module.a": 1})) == ["a"]
    assert list(strip_prefixes({"network._orig_mod.a": 1, "mean": 2})) == ["network.a", "mean"]
    assert strip_prefixes({}) == {}


def test_a_network_whose_own_names_start_with_such_a_prefix(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.model = small(seed).network

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    source, target = Wrapper(0), Classifier(Wrapper(1), [0.0], [1.0])
    for state in (source.state_dict(), source.model.state_dict()):
        fresh = Classifier(Wrapper(2), [0.0], [1.0])
        assert load_weights(fresh, save_zip(state, tmp_path)) == []
        assert_same(fresh.network, source)
    new = load_weights(target, save_zip(small(0, classes=7).network.state_dict(), tmp_path))
    assert new == ["network.model.fc.weight", "network.model.fc.bias"]


def test_the_dead_block_of_released_checkpoints_is_skipped(tmp_path: Path) -> None:
    model, other = small(0, "wrn-10-2"), small(1, "wrn-10-2")
    state = {f"module.{name}": value for name, value in model.network.state_dict().items()}
    state |= {
        "module.sub_block1.layer.0.conv1.weight": torch.rand(2, 2),
        "module.sub_block1.layer.0.bn1.bias": torch.rand(2),
    }
    assert load_weights(other, save_zip(state, tmp_path)) == []
    assert_same(model.network, other.network)


@pytest.mark.parametrize("whole", [True, False])
def test_another_number_of_classes_leaves_the_final_layer_new(whole: bool, tmp_path: Path) -> None:
    model, other = small(0, classes=5), small(1, classes=3)
    before = other.network.fc.weight.clone()
    file = save_zip(model.state_dict() if whole else model.network.state_dict(), tmp_path)
    assert load_weights(other, file) == ["network.fc.weight", "network.fc.bias"]
    assert torch.equal(other.network.fc.weight, before)
    assert_same(model.network.body, other.network.body)


def test_linear_weights_start_a_hypersphere_head_and_the_other_way_round(tmp_path: Path) -> None:
    linear, sphere = small(0), small(1, head=HE)
    assert load_weights(sphere, save_zip(linear.state_dict(), tmp_path)) == []
    assert torch.equal(sphere.network.fc.weight, linear.network.fc.weight)
    assert load_weights(small(2), save_zip(sphere.state_dict(), tmp_path)) == ["network.fc.bias"]


def test_a_file_without_the_final_layer_leaves_it_new(tmp_path: Path) -> None:
    state = {name: value for name, value in small(0).network.state_dict().items() if not name.startswith("fc.")}
    assert load_weights(small(1), save_zip(state, tmp_path)) == ["network.fc.weight", "network.fc.bias"]


def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    state = small(0).network.state_dict()
    del state["body.0.weight"]
    state["extra.weight"] = torch.rand(2)
    state["body.1.bias"] = torch.rand(9)
    model = small(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(HardsphereError) as error:
        load_weights(model, save_zip(state, tmp_path))
    assert "missing: body.0.weight; unexpected: extra.weight; of another shape: body.1.bias" in str(error.value)
    assert "weights.pt" in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_only_the_first_few_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match=r"and \d+ more") as error:
        load_weights(small(0), save_zip(small(0, "wrn-10-1").state_dict(), tmp_path))
    assert len(str(error.value)) < 800


def test_another_number_of_channels_does_not_fit(tmp_path: Path) -> None:
    grey = build("cnn-2", num_classes=3, in_channels=1, seed=0)
    with pytest.raises(HardsphereError, match=r"of another shape: body\.0\.weight"):
        load_weights(small(0), save_zip(grey.network.state_dict(), tmp_path))
    with pytest.raises(HardsphereError, match=r"of another shape: mean, std, network\.body\.0\.weight"):
        load_weights(small(0), save_zip(grey.state_dict(), tmp_path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match="no file of weights at"):
        read_weights(tmp_path / "none.pt")
    with pytest.raises(HardsphereError, match="no file of weights at"):
        read_weights(tmp_path)


@pytest.mark.parametrize("loader", ["torch.load", "hardsphere.models.weights.load_file"])
def test_a_file_that_may_not_be_read(loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    file = (save_zip if loader == "torch.load" else save_safetensors)(small().state_dict(), tmp_path)
    monkeypatch.setattr(loader, denied)
    with pytest.raises(HardsphereError, match="cannot be read: permission denied"):
        read_weights(file)


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.01, 0.3, 0.9, 0.999])
def test_truncated_files(kept: float, save: Callable[..., Path], tmp_path: Path) -> None:
    file = save(small().state_dict(), tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(HardsphereError, match="is damaged"):
        read_weights(file)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize(
    "content", [b"<!DOCTYPE html>", b"hello, no weights here", bytes(range(256)) * 5, b"\x80\x05K\x01"]
)
def test_files_of_something_else(content: bytes, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"weights.{suffix}"
    file.write_bytes(content)
    with pytest.raises(HardsphereError, match="is damaged"):
        read_weights(file)


class Trap:
    """A pickle of this would create a file wherever it is opened without care."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def save_pickle(state: object, folder: Path) -> Path:
    (folder / "weights.pkl").write_bytes(pickle.dumps(state))
    return folder / "weights.pkl"


@pytest.mark.parametrize("save", [save_zip, save_legacy, save_pickle])
def test_code_in_a_pickle_is_refused_and_not_run(save: Callable[..., Path], tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    file = save({"state_dict": small().state_dict(), "extra": Trap(mark)}, tmp_path)
    with pytest.raises(HardsphereError, match=r"asks to run .* which is refused"):
        read_weights(file)
    assert not mark.exists()


def test_what_a_pickle_asks_for_is_named(tmp_path: Path) -> None:
    file = save_zip({"state_dict": small().state_dict(), "accuracy": np.float64(0.9)}, tmp_path)
    with pytest.raises(HardsphereError, match=r"asks to run numpy\S*scalar"):
        read_weights(file)
    with pytest.raises(HardsphereError, match="asks to run"):
        read_weights(save_zip(small(), tmp_path))  # a whole module


@pytest.mark.parametrize("content", [{"epoch": 3, "args": {"lr": 0.1}}, {}, [1, 2], 7, {"model": {"lr": 0.1}}])
def test_files_without_weights(content: object, tmp_path: Path) -> None:
    with pytest.raises(HardsphereError, match="holds no weights"):
        read_weights(save_zip(content, tmp_path))
