"""Other people's backbones: the real packages where they can be imported, stand-ins for what we ask of them else."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hardsphere.errors import HardsphereError
from hardsphere.models import HeadSpec, build, features, foreign
from hardsphere.sphere import SphereHead, final_linear

HE = HeadSpec(feature_norm=True, weight_norm=True)


def real(module: str) -> Any:
    """The package itself; beside a torch of another build its import raises RuntimeError."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as reason:
        pytest.skip(f"{module} cannot be imported here: {reason}")


class StandIn(nn.Module):
    def __init__(self, num_classes: int, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, 6, 4, stride=2, padding=1))
        self.head = nn.Linear(6, num_classes)
        self.distance = nn.Linear(6, 2)

    def get_classifier(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).mean((2, 3)))


@pytest.fixture
def fake_timm(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        calls.append({"name": name, **options})
        return StandIn(options["num_classes"], options["in_chans"])

    timm = ModuleType("timm")
    timm.__dict__.update(
        list_models=lambda: ["convnext_tiny", "vit_tiny"],
        get_pretrained_cfg=lambda name: SimpleNamespace(fixed_input_size=True) if name.startswith("vit") else None,
        create_model=create_model,
    )
    monkeypatch.setitem(sys.modules, "timm", timm)
    return calls


@pytest.fixture
def fake_torchvision(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def get_model(name: str, **options: Any) -> nn.Module:
        calls.append({"name": name, **options})
        return StandIn(options["num_classes"])

    models = ModuleType("torchvision.models")
    models.__dict__.update(list_models=lambda module: ["resnet18", "vit_b_16"], get_model=get_model)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    return calls


def test_timm_is_asked_for_untrained_weights_and_told_the_size_it_needs(fake_timm: list[dict[str, Any]]) -> None:
    model = build("timm:convnext_tiny", num_classes=4, in_channels=1, image_size=20, head=HE)
    build("timm:vit_tiny.augreg", num_classes=4, image_size=20)
    common = {"pretrained": False, "num_classes": 4}
    assert fake_timm == [
        {"name": "convnext_tiny", "in_chans": 1, **common},
        {"name": "vit_tiny.augreg", "in_chans": 3, "img_size": 20, **common},
    ]
    assert isinstance(model.get_submodule(final_linear(model)), SphereHead)
    assert final_linear(model) == "network.head"
    assert model(torch.rand(2, 1, 20, 20)).shape == (2, 4)
    assert features(model, torch.rand(2, 1, 20, 20)).shape == (2, 6)


@pytest.mark.usefixtures("fake_timm")
def test_a_linear_timm_model_keeps_its_classifier_apart_from_other_layers() -> None:
    assert final_linear(build("timm:convnext_tiny", num_classes=4)) == "network.head"


def test_torchvision_for_grey_images(fake_torchvision: list[dict[str, Any]]) -> None:
    model = build("torchvision:resnet18", num_classes=4, in_channels=1, head=HE)
    build("torchvision:vit_b_16", num_classes=4, image_size=64)
    assert fake_torchvision == [
        {"name": "resnet18", "weights": None, "num_classes": 4},
        {"name": "vit_b_16", "weights": None, "num_classes": 4, "image_size": 64},
    ]
    stem = model.network.stem[0]
    assert (stem.in_channels, stem.kernel_size, stem.stride, stem.padding) == (1, (4, 4), (2, 2), (1, 1))
    assert model(torch.rand(2, 1, 20, 20)).shape == (2, 4)


@pytest.mark.usefixtures("fake_timm", "fake_torchvision")
def test_unknown_foreign_names() -> None:
    with pytest.raises(HardsphereError, match=r"timm has no model named 'convnext_tin'\. Did you mean 'convnext_tiny'"):
        build("timm:convnext_tin", num_classes=4)
    with pytest.raises(HardsphereError, match="torchvision has no model named ''"):
        build("torchvision:", num_classes=4)


@pytest.mark.parametrize(
    "failure", [ImportError("No module"), RuntimeError("operator torchvision::nms does not exist")]
)
@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_packages_that_cannot_be_imported(name: str, failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        raise failure

    monkeypatch.setattr(foreign.importlib, "import_module", fail)
    with pytest.raises(HardsphereError, match=f"need the package {name.partition(':')[0]}") as error:
        build(name, num_classes=4)
    assert str(failure) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["resnet50", "wide_resnet50_2"])
def test_our_networks_are_torchvisions(name: str) -> None:
    torchvision_models = real("torchvision.models")
    theirs = getattr(torchvision_models, name)(weights=None).eval()
    ours = build(name, num_classes=1000).network.eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["resnet152", "wide_resnet101_2"])
def test_the_deep_networks_have_torchvisions_names(name: str) -> None:
    torchvision_models = real("torchvision.models")
    with torch.device("meta"):
        theirs = getattr(torchvision_models, name)(weights=None).state_dict()
        ours = build(name, num_classes=1000).network.state_dict()
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}


@pytest.mark.parametrize("name", ["resnet18", "vit_b_32", "mobilenet_v3_small"])
def test_real_torchvision_models(name: str) -> None:
    real("torchvision.models")
    model = build(f"torchvision:{name}", num_classes=4, in_channels=1, image_size=64, head=HE).eval()
    x = torch.rand(2, 1, 64, 64)
    assert model(x).shape == (2, 4)
    torch.testing.assert_close(model.get_submodule(final_linear(model))(features(model, x)), model(x))


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "convnext_atto"])
def test_real_timm_models(name: str) -> None:
    real("timm")
    model = build(f"timm:{name}", num_classes=4, in_channels=1, image_size=64, head=HE).eval()
    x = torch.rand(2, 1, 64, 64)
    assert model(x).shape == (2, 4)
    torch.testing.assert_close(model.get_submodule(final_linear(model))(features(model, x)), model(x))
