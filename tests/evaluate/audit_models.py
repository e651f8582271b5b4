"""Models with one planted defect each, around an honest classifier of digits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fit_linear(x: Tensor, y: Tensor, classes: int = 10, steps: int = 600) -> nn.Module:
    """Softmax regression, hardly decayed, so that its scale is its own: honest, convex, without a random number."""
    weight, bias = torch.zeros(classes, x[0].numel(), requires_grad=True), torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=0.05)
    for _ in range(steps):
        loss = F.cross_entropy(x.flatten(1) @ weight.T + bias, y) + 1e-5 * weight.pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    layer = nn.Linear(x[0].numel(), classes)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return nn.Sequential(nn.Flatten(), layer).eval()


class Around(nn.Module):
    """An honest model and something before or behind it."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.model = model
        for name, value in settings.items():
            setattr(self, name, value)
        self.eval()


class Detached(Around):
    """No gradient at all."""

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.detach())


class Rounded(Around):
    """Logits on a fine grid: right answers, gradient zero everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.model(x) * 64).round() / 64


class Opaque(Around):
    """Leaves torch on the way, and so refuses an image that wants a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.model(torch.from_numpy(x.numpy().copy())).detach().numpy())


class Saturated(Around):
    """Logits so large that the softmax is exactly one-hot: the cross-entropy has no gradient, the margin has."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e4 * self.model(x)


class _Backward(torch.autograd.Function):
    """The identity, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.change(x, gradient), None


class Misleading(Around):
    """Right answers, and whatever gradient ``change(image, gradient)`` makes of the true one."""

    change: Any

    def forward(self, x: Tensor) -> Tensor:
        return self.model(_Backward.apply(x, self.change))


def not_a_number(x: Tensor, gradient: Tensor) -> Tensor:
    return gradient / 0 * 0


def right_above_bright_below(x: Tensor, gradient: Tensor) -> Tensor:
    """Right in the upper half of the image; in the lower half always "brighter", wherever the attack starts.

    A gradient of zero there would leave the random start in place, so that more starts were more noise.
    """
    rows = torch.arange(x.shape[2], device=x.device)[:, None]
    return torch.where(rows < x.shape[2] // 2, gradient, gradient.abs().amax(dim=(1, 2, 3), keepdim=True))


def scrambled(x: Tensor, gradient: Tensor) -> Tensor:
    """The right sizes with signs that have nothing to do with the image."""
    code = (x.double().flatten(1) + 1) * torch.linspace(1e4, 2e4, x[0].numel(), dtype=torch.float64)
    return torch.where(((code + code.sum(1, keepdim=True)) % 1 < 0.5).view_as(gradient), gradient, -gradient)


def right_from_few_starts(x: Tensor, gradient: Tensor) -> Tensor:
    """Uphill from one start in seven and from clean images, else downhill; the corners, which tell, stay in place."""
    corners = torch.zeros_like(x, dtype=torch.bool)
    corners[:, :, :: x.shape[2] - 1, :: x.shape[3] - 1] = True
    told = (x.double() * corners).flatten(1).sum(1) * 1600 % 1
    right = (told < 0.07) | (told > 0.93)
    return torch.where(corners, 0, torch.where(right.view(-1, 1, 1, 1), gradient, -gradient))


class Remembering(Around):
    """Follows an image no farther than ``eps`` from one that it remembers: honest in the ball, constant beyond."""

    eps: float
    memory: Tensor

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach().flatten(1), self.memory.flatten(1)).argmin(dim=1)
        home = self.memory[nearest]
        return self.model(home + (x - home).clamp(-self.eps, self.eps))


class Noisy(Around):
    """Gaussian noise on every image it sees, in eval mode too."""

    sigma: float

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x + self.sigma * torch.randn_like(x))


class Softmax(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).softmax(dim=1)


class LogSoftmax(Around):
    """Logits again, up to a constant: no defect."""

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).log_softmax(dim=1)


class Scaled(Around):
    factor: float

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.model(x)


class Caching(Around):
    """Gives an image near one that it was asked for before the answer of then; gradients go through."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.seen, self.said = torch.empty(0), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        logits, flat = self.model(x), x.detach().flatten(1)
        if len(self.seen):
            far, which = torch.cdist(flat, self.seen, p=float("inf")).min(dim=1)
            logits = logits + torch.where(far[:, None] < 0.15, self.said[which] - logits.detach(), 0.0)
        self.seen = torch.cat([self.seen.view(-1, flat.shape[1]), flat])
        self.said = torch.cat([self.said.view(-1, logits.shape[1]), logits.detach()])
        return logits


class Clipping(Around):
    """Cuts its images off where most of a digit's pixels lie: these have no gradient, and can be moved all the same."""

    def forward(self, x: Tensor) -> Tensor:
        small = F.avg_pool2d((x.clamp(0.05, 0.95) - 0.05) / 0.9, 4)
        return self.model(small)


class NotANumber(Around):
    """NaN for images that are bright on the whole."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x.flatten(1).mean(1, keepdim=True) > 0.33
        return torch.where(bright, torch.nan, self.model(x))


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(10.0).expand(len(x), 10)


class WithDropout(Around):
    """Dropout before an honest model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.dropout = nn.Dropout(0.3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.dropout(x))


class WithBatchNorm(Around):
    """Batch normalisation before an honest model, as good as the identity in eval mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.norm = nn.BatchNorm2d(1, affine=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.norm(x))


class BatchCoupled(Around):
    """Every image is compared with the mean of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        return logits - 0.5 * logits.mean(dim=0)


class Unnormalised(Around):
    """Expects images that have been normalised with mean and standard deviation."""

    mean: float
    std: float

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x * self.std + self.mean)
