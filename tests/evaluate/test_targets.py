"""Targets: ours bring everything, foreign ones must say what they are measured against, unsafe ones are refused."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hardsphere.errors import HardsphereError
from hardsphere.evaluate import Entry, evaluate
from hardsphere.evaluate.targets import parse_radii, resolve
from hardsphere.models import Classifier, build
from hardsphere.recipes import recipe
from hardsphere.threat import Ball
from hardsphere.train import train

PGD = Entry("pgd", "pgd", {"steps": 2})
DIGITS = {"data": "digits", "eps": "0.1", "norm": "linf"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run directory, as small as they come."""
    config = recipe("digits/pgd-he", {"epochs": "2", "model": "cnn-2"})
    return train(config, tmp_path_factory.mktemp("run") / "run").path


def test_a_run_brings_its_data_its_ball_and_how_it_was_selected(run):
    job = resolve(run)
    assert job.balls == (Ball("linf", recipe("digits/pgd-he", {}).attack.eps),)
    assert len(job.source) > 100
    assert len(job.class_names) == 10
    assert job.about["target"] == str(run)
    assert job.about["data"] == "digits test"
    assert job.about["selection"]
    assert not job.model.training
    result = evaluate(job.model, job.source, ball=job.balls, suite=[PGD], limit=20, about=job.about)
    assert result.card["data"]["n"] == 20
    assert result.card["model"]["selection"] == job.about["selection"]
    assert result.card["data"]["class_names"] == list(job.class_names)


def test_a_run_can_be_measured_at_other_radii_and_on_other_data(run, tmp_path):
    file = tmp_path / "some.npz"
    np.savez(file, x=np.zeros((3, 8, 8, 1), np.uint8), y=np.array([0, 4, 7]))
    job = resolve(run, data=str(file), eps="1/255,2/255", norm="l2")
    assert job.balls == (Ball("l2", 1 / 255), Ball("l2", 2 / 255))
    assert len(job.source) == 3
    assert job.about["data"] == f"{file} test"
    # The data has no class 8 or 9, and numbers for names: the model's own names count.
    result = evaluate(job.model, job.source, ball=job.balls, suite=[PGD], class_names=job.class_names)
    assert len(result.card["results"][0]["classes"]) == 10


def test_the_papers_radius_is_one_of_its_norm(run, tmp_path):
    config = recipe("digits/pgd-he", {"epochs": "1", "model": "cnn-2", "attack.norm": "l2", "attack.eps": "1.0"})
    path = train(config, tmp_path / "l2").path
    assert resolve(path).balls == (Ball("l2", 1.0),)
    assert resolve(path, suite="paper").balls == (Ball("linf", 0.031),)
    assert resolve(path, suite="paper", eps="0.5").balls == (Ball("l2", 0.5),)
    for target in (path, run):
        with pytest.raises(HardsphereError, match="radius of its own in linf only: add --eps for l2"):
            resolve(target, suite="paper", norm="l2")


def test_a_run_under_the_paper_suite_takes_the_papers_radius(run):
    assert resolve(run, suite="paper").balls == (Ball("linf", 0.031),)
    assert resolve(run, suite="paper", eps=0.2).balls == (Ball("linf", 0.2),)


def test_a_model_file_of_ours_is_a_target_and_needs_nothing_else(run):
    file = run / "checkpoints" / "best" / "model.safetensors"
    job = resolve(file)
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(job.model(x), resolve(run).model(x))
    with pytest.raises(HardsphereError, match="its own network"):
        resolve(file, network="cnn")


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_a_file_of_weights_needs_the_name_of_its_network(tmp_path, form):
    model = build("cnn-2", num_classes=10, in_channels=1, image_size=8, seed=1).eval()
    file = tmp_path / f"weights.{form}"
    save = torch.save if form == "pt" else save_file
    save(dict(model.state_dict()), file)
    with pytest.raises(HardsphereError, match="does not say of which network"):
        resolve(file, **DIGITS)
    job = resolve(file, network="cnn-2", **DIGITS)
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(job.model(x), model(x))


def test_weights_without_a_final_layer_for_these_classes_are_no_model(tmp_path):
    other = build("cnn-2", num_classes=7, in_channels=1, image_size=8, seed=1)
    torch.save(other.state_dict(), tmp_path / "seven.pt")
    with pytest.raises(HardsphereError, match="no weights for"):
        resolve(tmp_path / "seven.pt", network="cnn-2", **DIGITS)


MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
    def forward(self, x):
        return self.layer(x.flatten(1))

ready = Net()
number = 3

def wrong():
    return "no network"

def needs(width):
    return Net()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "toy_nets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield "toy_nets"
    sys.modules.pop("toy_nets", None)


def test_a_callable_makes_the_network_and_weights_fill_it(module, tmp_path):
    before = list(sys.path)
    job = resolve(f"{module}:Net", **DIGITS)
    assert sys.path == before
    assert job.model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert job.balls == (Ball("linf", 0.1),)
    weights = {"state_dict": {"module.layer.weight": torch.ones(10, 64), "module.layer.bias": torch.arange(10.0)}}
    torch.save(weights, tmp_path / "w.pt")
    filled = resolve(f"{module}:Net", weights=tmp_path / "w.pt", **DIGITS).model
    assert torch.equal(filled(torch.zeros(1, 1, 8, 8)), torch.arange(10.0)[None])
    assert isinstance(resolve(f"{module}:ready", mean=[0.5], std=[0.2], **DIGITS).model, Classifier)


def test_a_path_that_is_not_there_is_said_so_before_anything_is_asked_for():
    with pytest.raises(HardsphereError, match="'no/such/run' is no target: there is no such run directory or file"):
        resolve("no/such/run")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{module}:Nothing", "has nothing named 'Nothing'"),
        ("no_such_module_at_all:Net", "cannot be imported"),
        ("{module}:number", "is a int"),
        ("{module}:wrong", "returned a str"),
        ("{module}:needs", "without arguments"),
        ("no-such-directory", "is no target"),
        ("missing.pt", "no file of weights"),
    ],
)
def test_a_target_that_is_none_is_one_sentence(module, name, message):
    with pytest.raises(HardsphereError, match=message) as caught:
        resolve(name.format(module=module), **DIGITS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("missing", "flag"), [("data", "--data"), ("eps", "--eps"), ("norm", "--norm")])
def test_what_a_foreign_model_does_not_say_must_be_said(module, missing, flag):
    with pytest.raises(HardsphereError, match=flag):
        resolve(f"{module}:Net", **{key: value for key, value in DIGITS.items() if key != missing})


class Malicious:
    """A pickle that would leave a trace if it were ever run."""

    def __init__(self, trace) -> None:
        self.trace = trace

    def __reduce__(self):
        return (open, (str(self.trace), "w"))


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_pickle_that_asks_to_run_code_is_refused_and_not_run(tmp_path, form):
    trace, file = tmp_path / "trace", tmp_path / "model.pt"
    if form == "pickle":
        file.write_bytes(pickle.dumps(Malicious(trace)))
    else:
        torch.save({"state_dict": Malicious(trace)}, file)
    with pytest.raises(HardsphereError):
        resolve(file, network="cnn-2", **DIGITS)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["junk.pt", "junk.safetensors"])
def test_a_file_that_is_no_model_is_one_sentence(tmp_path, name):
    (tmp_path / name).write_bytes(b"this is no model" * 10)
    with pytest.raises(HardsphereError, match=r"damaged|no file of weights"):
        resolve(tmp_path / name, network="cnn-2", **DIGITS)


def test_published_networks_come_with_their_own_normalisation(monkeypatch):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    net.default_cfg = {"mean": (0.25,), "std": (0.5,)}
    asked = []

    def create_model(name, pretrained):
        asked.append((name, pretrained))
        if name != "tiny":
            raise RuntimeError("Unknown model\n(and more)")
        return net

    timm = ModuleType("timm")
    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    job = resolve("timm:tiny", **DIGITS)
    x = torch.rand(2, 1, 8, 8)
    assert asked == [("tiny", True)]
    assert torch.allclose(job.model(x), net((x - 0.25) / 0.5))
    with pytest.raises(HardsphereError, match="cannot be had with its published weights") as caught:
        resolve("timm:other", **DIGITS)
    assert "\n" not in str(caught.value)

    weights = SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: SimpleNamespace(mean=[0.1], std=[0.3])))
    models = ModuleType("torchvision.models")
    models.get_model_weights = lambda name: weights
    models.get_model = lambda name, weights: net
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    assert torch.allclose(resolve("torchvision:tiny", **DIGITS).model(x), net((x - 0.1) / 0.3))


def test_a_package_that_is_not_there_is_said_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(HardsphereError, match="hardsphere\\[backbones\\]"):
        resolve("timm:resnet18", **DIGITS)


def test_radii_are_written_as_people_write_them():
    assert parse_radii("2/255, 4/255,0.5") == [2 / 255, 4 / 255, 0.5]
    for text in ("", "8/0", "x", "1,,2", "nan"):
        with pytest.raises(HardsphereError, match="eps is"):
            parse_radii(text)


@pytest.mark.parametrize(
    ("source", "name", "sentence"),
    [
        ("raise ValueError('no weights\\nhere')", "make", "fails when it is imported: ValueError: no weights."),
        ("def make(:", "make", "fails when it is imported: SyntaxError"),
        ("def make(): raise KeyError('arch')", "make", "makes no network: KeyError: 'arch'."),
        ("def make(): open('/nowhere/weights')", "make", "makes no network: FileNotFoundError"),
    ],
)
def test_what_fails_in_a_module_of_ones_own_is_one_sentence(
    source: str, name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path.name  # another one for each case
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(HardsphereError, match=re.escape(sentence)) as caught:
        resolve(f"{module}:{name}", suite="quick", data="digits", eps="0.1", norm="linf")
    assert "\n" not in str(caught.value)
