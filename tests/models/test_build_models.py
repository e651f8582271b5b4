"""Every model by name: its size, its names in the state dict, the images it takes, the errors it gives."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hardsphere.errors import HardsphereError
from hardsphere.models import Classifier, HeadSpec, build, features, names
from hardsphere.sphere import ScaledView, SphereHead, attach, final_linear, find_head

HE = HeadSpec(feature_norm=True, weight_norm=True, margin=0.2)
SMALL = ["cnn-4", "preactresnet18-4", "wrn-10-1", "wrn-16-2"]

PARAMETERS = [
    ("wrn-34-10", 10, HeadSpec(), 46_160_474),
    ("wrn-34-10", 10, HE, 46_160_464),
    ("wrn-34-20", 10, HeadSpec(), 184_531_674),
    ("preactresnet18", 10, HeadSpec(), 11_172_170),
    ("resnet50", 1000, HeadSpec(), 25_557_032),
    ("resnet152", 1000, HeadSpec(), 60_192_808),
    ("wide_resnet50_2", 1000, HeadSpec(), 68_883_240),
    ("wide_resnet101_2", 1000, HeadSpec(), 126_886_696),
]


@pytest.mark.parametrize(("name", "classes", "head", "expected"), PARAMETERS)
def test_parameter_counts(name: str, classes: int, head: HeadSpec, expected: int) -> None:
    with torch.device("meta"):
        model = build(name, num_classes=classes, head=head)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("channels", "size"), [(1, (8, 8)), (3, (32, 32)), (3, (33, 17)), (1, (5, 5))])
def test_any_channels_and_any_size(name: str, channels: int, size: tuple[int, int]) -> None:
    model = build(name, num_classes=4, in_channels=channels, seed=0)
    x = torch.rand(2, channels, *size)
    for head in (False, True):
        if head:
            attach(model)
        logits = model.train()(x)
        assert logits.shape == (2, 4)
        logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert model.eval()(x).isfinite().all()


@pytest.mark.parametrize("size", [64, 57])
def test_the_imagenet_networks_take_other_sizes_too(size: int) -> None:
    model = build("resnet50", num_classes=3, in_channels=1, seed=0).eval()
    with torch.no_grad():
        assert model(torch.rand(1, 1, size, size)).shape == (1, 3)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last(name: str, channels: int) -> None:
    model = build(name, num_classes=4, in_channels=channels, mean=[0.5] * channels, std=[0.2] * channels, seed=0).eval()
    x = torch.rand(2, channels, 9, 9)
    expected = model(x)
    last = model.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-4)


def test_channels_last_passes_through_the_normalisation() -> None:
    seen: list[torch.Tensor] = []
    probe = nn.Identity()
    probe.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model = Classifier(probe, [0.1, 0.2, 0.3], [1.0, 2.0, 3.0])
    model(torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_wrn_has_the_names_of_the_released_checkpoints() -> None:
    state = build("wrn-16-2", num_classes=10).network.state_dict()
    block = ["bn1", "conv1", "bn2", "conv2"]
    layers = {"conv1", "bn1", "fc"}
    for group in (1, 2, 3):
        layers |= {f"block{group}.layer.{n}.{part}" for n in (0, 1) for part in block}
        layers.add(f"block{group}.layer.0.convShortcut")
    assert {name.rpartition(".")[0] for name in state} == layers
    assert state["block2.layer.0.convShortcut.weight"].shape == (64, 32, 1, 1)
    assert "block1.layer.0.convShortcut.weight" not in build("wrn-10-1", num_classes=10).network.state_dict()


def test_preactresnet18_has_the_usual_names() -> None:
    state = build("preactresnet18-8", num_classes=10).network.state_dict()
    layers = {"conv1", "bn", "linear"}
    for stage in (1, 2, 3, 4):
        layers |= {f"layer{stage}.{n}.{part}" for n in (0, 1) for part in ("bn1", "conv1", "bn2", "conv2")}
        if stage > 1:
            layers.add(f"layer{stage}.0.shortcut.0")
    assert {name.rpartition(".")[0] for name in state} == layers
    assert state["linear.weight"].shape == (10, 64)


def test_resnet50_has_the_names_of_torchvision() -> None:
    with torch.device("meta"):
        state = build("resnet50", num_classes=1000).network.state_dict()
    assert len(state) == 320
    for name, shape in {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_mean": (64,),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.num_batches_tracked": (),
        "layer3.5.conv2.weight": (256, 256, 3, 3),
        "layer4.2.bn3.bias": (2048,),
        "fc.weight": (1000, 2048),
        "fc.bias": (1000,),
    }.items():
        assert tuple(state[name].shape) == shape


def test_preactivated_shortcuts_start_from_the_activated_input() -> None:
    """With the convolutions of the other branch at zero, a block that changes shape is its shortcut alone."""
    for name, path, shortcut in (
        ("preactresnet18-4", "layer2.0", "shortcut.0"),
        ("wrn-10-2", "block2.layer.0", "convShortcut"),
    ):
        block = build(name, num_classes=2, seed=0).network.get_submodule(path).eval()
        nn.init.zeros_(block.conv2.weight)
        x = torch.randn(2, block.conv1.in_channels, 6, 6)
        activated = F.relu(x / math.sqrt(1 + 1e-5))  # untouched statistics: mean 0, variance 1
        expected = F.conv2d(activated, block.get_submodule(shortcut).weight, stride=2)
        torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("name", ["cnn-32", "preactresnet18-32", "wrn-10-4", "resnet50"])
def test_initial_weights(name: str) -> None:
    model = build(name, num_classes=10, seed=0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            expected = math.sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels))
            count = module.weight.numel()
            assert module.bias is None
            assert abs(module.weight.std() / expected - 1) < 5 / math.sqrt(2 * count)
            assert abs(module.weight.mean()) < 5 * expected / math.sqrt(count)
        elif isinstance(module, nn.BatchNorm2d):
            assert module.weight.eq(1).all()
            assert module.bias.eq(0).all()
        elif isinstance(module, nn.Linear):
            assert module.bias.eq(0).all()
            assert 0.9 / math.sqrt(module.in_features) < module.weight.abs().max() <= 1 / math.sqrt(module.in_features)


def test_a_seed_makes_the_weights_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = build("cnn-4", num_classes=3, seed=1)
    assert torch.equal(torch.rand(3), expected)
    again, other = build("cnn-4", num_classes=3, seed=1), build("cnn-4", num_classes=3, seed=2)
    assert torch.equal(first.network.fc.weight, again.network.fc.weight)
    assert not torch.equal(first.network.fc.weight, other.network.fc.weight)


def test_all_heads_of_a_seed_start_from_the_same_weights() -> None:
    linear, sphere = build("cnn-4", num_classes=3, seed=1), build("cnn-4", num_classes=3, seed=1, head=HE)
    plain = linear.state_dict()
    for name, value in sphere.state_dict().items():
        assert torch.equal(value, plain[name]), name
    assert plain.keys() - sphere.state_dict().keys() == {"network.fc.bias"}


def test_head_specs() -> None:
    assert find_head(build("cnn-4", num_classes=3)) is None
    head = find_head(build("cnn-4", num_classes=3, head=HeadSpec(True, True, angular=True, scale=10.0, margin=0.1)))
    assert isinstance(head, SphereHead)
    assert (head.feature_norm, head.weight_norm, head.angular, head.scale, head.margin) == (True, True, True, 10.0, 0.1)
    half = find_head(build("cnn-4", num_classes=3, head=HeadSpec(weight_norm=True)))
    assert isinstance(half, SphereHead)
    assert (half.feature_norm, half.weight_norm, half.margin) == (False, True, 0.0)
    with pytest.raises(HardsphereError, match="angular"):
        build("cnn-4", num_classes=3, head=HeadSpec(angular=True))


def test_normalisation_lives_in_the_model() -> None:
    mean, std = [0.4914, 0.4822, 0.4465], [0.2471, 0.2435, 0.2616]
    model = build("cnn-4", num_classes=3, mean=mean, std=std, seed=0).eval()
    x = torch.rand(2, 3, 8, 8)
    expected = model.network((x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None])
    torch.testing.assert_close(model(x), expected)
    assert model.state_dict()["mean"].shape == model.state_dict()["std"].shape == (1, 3, 1, 1)
    assert Classifier(nn.Identity(), torch.tensor([0.5]), (0.5,))(torch.ones(1, 3, 1, 1)).eq(1).all()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("head", [HeadSpec(), HE])
def test_features_are_what_the_last_layer_is_given(name: str, head: HeadSpec) -> None:
    model = build(name, num_classes=3, head=head, seed=0).eval()
    x = torch.rand(2, 3, 8, 8, requires_grad=True)
    z = features(model, x)
    torch.testing.assert_close(model.get_submodule(final_linear(model))(z), model(x))
    assert torch.autograd.grad(z.sum(), x)[0].abs().sum() > 0
    torch.testing.assert_close(features(ScaledView(model, 0.5), x), z)
    assert not model.get_submodule(final_linear(model))._forward_pre_hooks


def test_features_of_a_compiled_model() -> None:
    model = build("cnn-2", num_classes=3, seed=0).eval()
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(features(torch.compile(model, backend="eager"), x), features(model, x))


def test_features_that_are_out_of_reach() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(HardsphereError, match="never calls its layer 'fc'"):
        features(Idle(), torch.rand(2, 3))


def test_names_are_known() -> None:
    for name in names():
        if name == name.lower():
            with torch.device("meta"):
                build(name, num_classes=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrn-33-10", "6n \\+ 4"),
        ("wrn-4-10", "6n \\+ 4"),
        ("wrn-34-0", "width at least 1"),
        ("preactresnet", "Did you mean 'preactresnet18'"),
        ("resnet51", "Did you mean 'resnet50'"),
        ("wrn-3410", "Did you mean 'wrn-34-10'"),
        ("cnn-0", "Unknown model 'cnn-0'"),
        ("cnn-big", "Unknown model"),
        ("", "Unknown model"),
        ("keras:vgg", "Unknown model"),
        ("wrn-34-10\n", "Unknown model"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(HardsphereError, match=message):
        build(name, num_classes=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 1}, "num_classes is 1"),
        ({"num_classes": 3, "in_channels": 0}, "in_channels is 0"),
        ({"num_classes": 3, "image_size": 0}, "image_size is 0"),
        ({"num_classes": 3, "mean": [0.5]}, "mean has 1 numbers, but the images have 3 channels"),
        ({"num_classes": 3, "std": [1.0, 1.0, 0.0]}, "above 0"),
        ({"num_classes": 3, "std": [1.0, 1.0, math.nan]}, "std is .* finite number"),
        ({"num_classes": 3, "mean": [0.0, math.inf, 0.0]}, "mean is .* finite number"),
    ],
)
def test_options_that_make_no_model(options: dict[str, object], message: str) -> None:
    with pytest.raises(HardsphereError, match=message):
        build("cnn-2", **options)  # type: ignore[arg-type]
