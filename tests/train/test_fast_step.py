"""The compiled pieces of a training step against their slow twins, on a CPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hardsphere.attacks.pgd import as_it_is
from hardsphere.blocks import functions, has_blocks, layers
from hardsphere.data import Augment, load, train_loader
from hardsphere.data.sources import Batch
from hardsphere.noise import Noise
from hardsphere.objectives import Learner
from hardsphere.recipes import recipe
from hardsphere.train import step
from hardsphere.train.averaging import _move, _move_in_one_pass, make_average
from hardsphere.train.compiling import Compiler
from hardsphere.train.deployed import build_model
from hardsphere.train.step import Stepper, fast_learner
from hardsphere.train.tensors import on_host
from unasked import unasked

CPU = torch.device("cpu")
AUGMENT = Augment(pad=2, flip=True, cutout=2, cutmix=1.0)


def refusing(text: str) -> None:
    raise AssertionError(text)


def unable(graph: Any, inputs: Any) -> Any:
    """A backend of torch's compiler on a machine that it cannot compile for."""
    raise NotImplementedError("no such instruction")


def first_batch(size: int) -> Batch:
    data = load("digits")
    assert data.train is not None
    return next(train_loader(data.train, size).epoch(0))


def compiler(backend: str = "aot_eager") -> Compiler:
    """It traces as the real compiler does, one graph for each function, but takes no minutes to write machine code."""
    return Compiler(refusing, backend=backend, fullgraph=True)


def steps(name: str, fast: bool, count: int = 2, **changes: str) -> Stepper:
    """A few training steps, plain, or from the same compiled pieces as on a GPU."""
    options = {"model": "cnn-4", "batch": "16", "attack.steps": "2", "ema.decay": "0.9", "precision": "float32"}
    config = recipe(f"digits/{name}", options | changes)
    data = load("digits")
    assert data.train is not None
    model = build_model(config, data).train()
    mixed = name.startswith("alp")  # labels are numbers, or probabilities
    loader = train_loader(data.train, config.batch, augment=AUGMENT if mixed else None)
    stepper = Stepper(config, model, make_average(config, model), CPU, len(loader))
    learner = stepper.plain
    for batch in itertools.islice(loader.epoch(0), count):
        if fast and learner is stepper.plain:
            learner = fast_learner(stepper.plain, config.precision, batch.x, compiler(), refusing)
        one_step(stepper, learner, batch, awp=bool(config.awp.gamma))
    return stepper


def one_step(stepper: Stepper, learner: Learner, batch: Batch, awp: bool) -> None:
    stepper.clock.fill_(stepper.updates)
    stepper.rates.fill_(0.01)
    stepper._train(learner, batch, torch.tensor(3), awp)
    stepper.updates += stepper.updates_per_batch


FRAMEWORKS: list[tuple[str, dict[str, str]]] = [
    ("standard", {}),
    ("pgd-he", {}),
    ("pgd", {"awp.gamma": "0.01", "label_smoothing": "0.1"}),
    ("alp-he", {}),
    ("trades-mhe", {"attack.norm": "l2", "attack.eps": "0.5"}),
    ("free-he", {}),
    ("fast", {"attack.bn": "train"}),
]


@pytest.mark.parametrize(("name", "changes"), FRAMEWORKS)
def test_compiled_steps_train_the_same(name: str, changes: dict[str, str]) -> None:
    """After one step but for rounding; in a second one, that may carry an image of an attack over a kink."""
    for count, near in ((1, 1e-5), (2, 1e-2)):
        plain, fast = (steps(name, fast, count, **changes) for fast in (False, True))
        assert plain.meters.keys() == fast.meters.keys()
        for meter, value in plain.meters.items():
            flips = 1.0 if count > 1 and "accuracy" in meter else 1e-6
            torch.testing.assert_close(fast.meters[meter], value, rtol=near, atol=flips)
        for one, other in zip(plain.average.model.parameters(), fast.average.model.parameters(), strict=True):
            assert (one - other).norm() < (1e-4 if count == 1 else 0.02) * one.norm() + 1e-5


# As above, and with the attack on the shadow: with its layers one by one, and with fused blocks.
RECORDED = [(name, changes, "cnn-4", "float32") for name, changes in FRAMEWORKS]
RECORDED += [("pgd-he", {}, model, "bf16") for model in ("cnn-4", "wrn-10-4")]


@pytest.mark.parametrize(("name", "changes", "model", "precision"), RECORDED)
def test_a_step_asks_the_device_nothing_and_tells_it_nothing(
    name: str, changes: dict[str, str], model: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "has_convolutions", lambda x: True)
    batch = str(layers.IMAGES if precision == "bf16" else 16)
    options = {"model": model, "batch": batch, "precision": precision, "attack.steps": "2", "ema.decay": "0.9"}
    config, data = recipe(f"digits/{name}", options | changes), load("digits")
    assert data.train is not None
    network = build_model(config, data).train()
    loader = train_loader(data.train, config.batch)
    stepper = Stepper(config, network, make_average(config, network), CPU, len(loader), fast=True)
    monkeypatch.setattr(stepper.guard, "check", lambda: None)  # after each update on a CPU alone
    monkeypatch.setattr(stepper, "_train", unasked(stepper._train))
    with torch.compiler.set_stance("force_eager"):  # the compiler asks while it compiles, which is before
        batches = list(itertools.islice(loader.epoch(0), 2))
        learner = fast_learner(stepper.plain, config.precision, batches[0].x, as_it_is, refusing)
        assert (learner.stand_in is not None) == (precision == "bf16")
        if learner.stand_in is not None:
            assert has_blocks(learner.stand_in()) == (model == "wrn-10-4")
        for images in batches:
            one_step(stepper, learner, images, awp=bool(config.awp.gamma))
    with pytest.raises(AssertionError, match="what is in a tensor"):
        unasked(lambda: stepper.guard.first_bad.item())()
    with pytest.raises(AssertionError, match="numbers of its own"):
        unasked(lambda: stepper.clock + torch.tensor(1))()


@pytest.mark.parametrize("name", ["pgd-he", "trades-mhe", "fast"])
def test_compiled_steps_in_bf16_attack_the_shadow(name: str) -> None:
    """Signs of gradients that bf16 rounds to nothing differ, so losses do as well; after one step only a little."""
    plain, fast = (steps(name, fast, count=1, precision="bf16") for fast in (False, True))
    for meter, value in plain.meters.items():
        torch.testing.assert_close(fast.meters[meter], value, rtol=0.02, atol=1.0)


@pytest.mark.parametrize(
    ("precision", "bn", "shadowed"), [("bf16", "eval", True), ("bf16", "train", False), ("float32", "eval", False)]
)
def test_only_an_attack_in_bf16_and_eval_mode_has_a_shadow(precision: str, bn: str, shadowed: bool) -> None:
    config = recipe("digits/pgd", {"model": "cnn-4", "attack.bn": bn})
    model = build_model(config, load("digits"))
    learner = fast_learner(
        Learner(model, None, config.attack.adversary()), precision, torch.rand(2, 1, 8, 8), compiler()
    )
    assert (learner.stand_in is not None) == shadowed


class Stubborn(nn.Module):
    """A linear layer that insists on float32, so bf16 weights do not go with it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            logits: Tensor = self.fc(x.float().mean(dim=(2, 3)))
            return logits


class Contrary(nn.Module):
    """It takes bf16 weights, and says the opposite."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return -logits if self.fc.weight.dtype == torch.bfloat16 else logits


@pytest.mark.parametrize("network", [Stubborn, Contrary])
def test_a_network_that_bf16_weights_do_not_suit_has_no_shadow(network: type[nn.Module]) -> None:
    adversary = recipe("digits/pgd").attack.adversary()
    model = network().train()
    said: list[str] = []
    learner = fast_learner(Learner(model, None, adversary), "bf16", torch.rand(2, 1, 8, 8), compiler(), said.append)
    assert learner.stand_in is None
    assert len(said) == 1
    assert "do not take bf16 weights" in said[0]
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_network_that_cannot_be_copied_is_attacked_itself() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).train()
    model.kept = model[1].weight * 2  # a tensor with a history, which torch does not copy
    said: list[str] = []
    learner = Learner(model, None, recipe("digits/pgd").attack.adversary())
    fast = fast_learner(learner, "bf16", torch.rand(2, 1, 8, 8), compiler(), said.append)
    assert fast.stand_in is None
    assert len(said) == 1
    assert "cannot be copied" in said[0]
    assert "Only Tensors created explicitly" in said[0]


@pytest.mark.parametrize(
    ("defect", "reason"),
    [
        ("none", None),
        ("forwards", "its answers change by"),
        ("backwards", "its gradients point elsewhere"),
        ("refusal", "RuntimeError: no such kernel"),
    ],
)
def test_fused_blocks_are_attacked_if_they_are_sound(
    defect: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are kernels; a kernel that goes wrong is not used, and that is said."""
    forwards, backwards = functions.convolve, functions.convolve_back

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    changes: dict[str, dict[str, Callable[..., Any]]] = {
        "none": {},
        "forwards": {"convolve": lambda *given, **more: [2 * image for image in forwards(*given, **more)]},
        "backwards": {"convolve_back": lambda *given, **more: -backwards(*given, **more)},
        "refusal": {"convolve": refuse},
    }
    for name, changed in changes[defect].items():
        monkeypatch.setattr(functions, name, changed)
    monkeypatch.setattr(step, "has_convolutions", lambda x: True)
    config = recipe("digits/pgd-he", {"model": "wrn-10-4"})
    model = build_model(config, load("digits"))
    x = torch.rand(layers.IMAGES, 1, 8, 8)
    model.train()(x)  # so that no norm is the identity
    said: list[str] = []
    learner = Learner(model, None, config.attack.adversary())
    stand_in = fast_learner(learner, "bf16", x, compiler(), said.append).stand_in
    assert stand_in is not None
    assert has_blocks(stand_in()) == (reason is None)
    assert len(said) == (reason is not None)
    assert reason is None or (reason in said[0] and "slower" in said[0])


def test_a_network_without_blocks_is_attacked_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "has_convolutions", lambda x: True)
    config = recipe("digits/pgd-he", {"model": "cnn-4"})
    model = build_model(config, load("digits"))
    learner = Learner(model, None, config.attack.adversary())
    stand_in = fast_learner(learner, "bf16", torch.rand(2, 1, 8, 8), compiler(), refusing).stand_in
    assert stand_in is not None
    assert type(stand_in()) is type(model)


@pytest.mark.parametrize("augment", [AUGMENT, Augment(pad=2, padding="reflect", flip=True)])
def test_compiled_batches_are_the_same(augment: Augment) -> None:
    """Epoch after epoch without compiling anew; the pixels lie in another order in memory."""
    source = load("digits").train
    assert source is not None
    whole = source.subset(range(40))
    fused = compiler()
    plain, fast = train_loader(whole, 16, augment=augment), train_loader(whole, 16, augment=augment, fused=fused)
    torch._dynamo.utils.counters.clear()
    for epoch in range(3):
        for one, other in zip(plain.epoch(epoch), fast.epoch(epoch), strict=True):
            assert torch.equal(one.x, other.x)
            assert torch.equal(one.y, other.y)
            assert torch.equal(one.ids, other.ids)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_noise_is_the_same() -> None:
    def numbers(ids: torch.Tensor, epoch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        noise = Noise(7, ids).fold("train", epoch)
        return noise.bits(3, 5), noise.fold("a").uniform(4), noise.fold("b").integers(-3, 9, 2), noise.signs(6)

    arguments = torch.arange(9) * 10**6, torch.tensor(4)
    for one, other in zip(numbers(*arguments), compiler()(numbers)(*arguments), strict=True):
        assert torch.equal(one, other)


def test_the_average_in_one_pass_is_the_average() -> None:
    generator = torch.Generator().manual_seed(0)
    live = [torch.randn(size, generator=generator) for size in ((3, 4), (5,), ())]
    slow = [torch.randn(tensor.shape, generator=generator) for tensor in live]
    quick = [tensor.clone() for tensor in slow]
    for weight in (0.9, 0.25, 0.001, 0.0):
        _move(slow, live, torch.tensor(weight))
        _move_in_one_pass(quick, live, torch.tensor(weight))
        torch.testing.assert_close(quick, slow)


def test_a_fused_update_goes_on_where_it_was() -> None:
    """Momenta come back from a file with their channels first, beside weights whose channels are last in memory."""
    config = recipe("digits/standard", {"model": "cnn-4", "batch": "8"})
    model = build_model(config, load("digits")).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(memory_format=layout(parameter))
    ends = []
    for interrupted in (False, True):
        ours = copy.deepcopy(model)
        for mine, given in zip(ours.parameters(), model.parameters(), strict=True):
            mine.grad = given.grad
        stepper = Stepper(config, ours, make_average(config, ours), CPU, 10, fast=True)
        stepper.optimizer.step()
        if interrupted:
            stepper.set_momenta(on_host(stepper.momenta()))
        stepper.optimizer.step()
        ends.append(list(ours.parameters()))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("momentum", ["0.9", "0"])
def test_a_fused_update_takes_in_a_body_that_was_frozen(momentum: str) -> None:
    """After the warm-up of a new head, which alone has momenta then."""
    config = recipe("digits/standard", {"model": "cnn-4", "batch": "8", "momentum": momentum, "nesterov": "false"})
    batch = first_batch(8)
    ends = []
    for fast in (False, True):
        model = build_model(config, load("digits")).train()
        stepper = Stepper(config, model, make_average(config, model), CPU, 10, fast=fast)
        for warming in (True, True, False, False):
            model.requires_grad_(not warming)
            model.get_submodule("network.fc").requires_grad_(True)
            one_step(stepper, stepper.plain, batch, awp=False)
        ends.append(list(model.parameters()))
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other)


def layout(parameter: Tensor) -> torch.memory_format:
    return torch.channels_last if parameter.dim() == 4 else torch.contiguous_format


def test_what_cannot_be_compiled_runs_as_it_is() -> None:
    """The compiler's refusal is said once, however often the function is made anew."""
    said: list[str] = []
    fused = Compiler(said.append, backend=unable)
    for number in range(3):
        assert fused(lambda x, number=number: x + number)(torch.ones(2)).tolist() == [1.0 + number] * 2
    assert len(said) == 1
    assert "no such instruction" in said[0]


def test_where_nothing_can_be_compiled_a_step_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has no compiler for what torch's has written: it refuses the network by itself as well."""
    said: list[str] = []
    real = torch.compile
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: real(function, backend=unable))
        config = recipe("digits/trades-he", {"model": "cnn-4", "batch": "8", "attack.steps": "2"})
        batch = first_batch(8)
        ends = []
        for fast in (False, True):
            model = build_model(config, load("digits")).train()
            stepper = Stepper(config, model, make_average(config, model), CPU, 10)
            compiled = fast_learner(stepper.plain, "float32", batch.x, Compiler(said.append), said.append)
            one_step(stepper, compiled if fast else stepper.plain, batch, awp=False)
            ends.append(list(model.parameters()))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)
    assert said
    assert all("runs slower" in text for text in said)


def test_the_compilers_option_is_one_of_torchs() -> None:
    """torch refuses an option that it does not know, or of another type."""
    Compiler()(lambda x: x)
    with pytest.raises(RuntimeError, match="autotune_everything"):
        Compiler(options={"triton.autotune_everything": False})(lambda x: x)


def test_a_process_may_train_many_models() -> None:
    """Each compiler starts afresh: torch's limit on recompiling one function does not add up over runs."""

    def scaled(factor: float) -> Any:
        return lambda x: x * factor

    for factor in range(2 * torch._dynamo.config.recompile_limit):
        assert compiler("eager")(scaled(factor))(torch.ones(1)).item() == factor
