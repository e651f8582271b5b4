"""Counter-based randomness: every number is a function of (seed, sample, purpose), of nothing else.

A usual generator hands out numbers in the order of the calls, so that what one sample receives depends on the
batch it shares, on where a run was resumed and on how the work was split. Here each sample has a key of its own,
made of the seed, its id in the data set and the purpose (`fold("apgd", restart, step)`), and each number is a hash
of that key and its position (splitmix64, Steele et al. 2014). The result is the same on every device and for every
batch size, and costs no state that a checkpoint would have to save.
"""

from __future__ import annotations

import hashlib
import math
import operator

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_GOLDEN_INVERSE = pow(_GOLDEN, -1, 1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The 64-bit pattern of ``value`` as the signed integer that torch's int64 holds."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift, a new tensor; torch's own is arithmetic and would smear the sign bit."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64: a bijection on 64 bits in which each input bit moves each output bit.

    In place from the first result on: on a CPU it is the memory that costs.
    """
    bits = _shift_right(bits, 30).bitwise_xor_(bits).mul_(_signed(_MIX_1))
    bits = _shift_right(bits, 27).bitwise_xor_(bits).mul_(_signed(_MIX_2))
    return _shift_right(bits, 31).bitwise_xor_(bits)


def _number(part: int | str) -> int:
    """A purpose as a 64-bit integer: text by its digest, integers as they are, though numpy's would overflow."""
    if isinstance(part, str):
        return int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
    return operator.index(part)


# The compiler is to take its results as they are. `torch.compiler.assume_constant_result` sets the same mark, but
# imports the whole compiler for it, which takes as long as all the rest of torch.
_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Noise:
    """Randomness for a batch of samples, one independent stream per sample.

    Args:
        seed: the seed of the whole run.
        ids: the samples' ids in their data set, an integer tensor of shape (B,), on the device of the numbers.
    """

    def __init__(self, seed: int, ids: Tensor) -> None:
        self.keys = _mix(ids.to(torch.int64) * _signed(_GOLDEN) + _signed(_number(seed) * _MIX_1 + 1))

    @classmethod
    def of_keys(cls, keys: Tensor) -> Noise:
        """The streams with these ``keys``, which another `Noise` has shown."""
        noise = cls.__new__(cls)
        noise.keys = keys
        return noise

    def fold(self, *purpose: int | str | Tensor) -> Noise:
        """The streams of one purpose, such as ``fold("pgd", restart, step)``. A part may be a tensor,
        a scalar or one number per sample.
        """
        keys = self.keys
        for part in purpose:
            if isinstance(part, Tensor):
                keys = _mix(keys + (part.to(torch.int64) + 1) * _signed(_GOLDEN))
            else:
                keys = _mix(keys + _signed((_number(part) + 1) * _GOLDEN))
        return self.of_keys(keys)

    def __getitem__(self, index: Tensor | slice) -> Noise:
        """The same streams for a part of the batch (a mask, positions or a slice)."""
        return self.of_keys(self.keys[index])

    def __len__(self) -> int:
        return len(self.keys)

    def bits(self, *shape: int) -> Tensor:
        """64 random bits per element, an int64 tensor of shape (B, *shape)."""
        counters = torch.arange(1, math.prod(shape) + 1, device=self.keys.device)
        # key + counter * golden, with the factor put outside: compilers count in 32 bits, where the product overflows.
        position = (self.keys * _signed(_GOLDEN_INVERSE))[:, None] + counters
        return _mix(position.mul_(_signed(_GOLDEN))).view(len(self.keys), *shape)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1) with 24 bits each, float32 of shape (B, *shape)."""
        return _shift_right(self.bits(*shape), 40).float() * 2.0**-24

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers (Box-Muller, two from each 64 bits), float32 of shape (B, *shape)."""
        count = math.prod(shape)
        bits = self.bits((count + 1) // 2)
        radius = (_shift_right(bits, 40).float() + 1) * 2.0**-24  # in (0, 1]: its logarithm is finite
        radius = radius.log_().mul_(-2).sqrt_()
        angle = (bits & 0xFFFFFF).float() * (2.0**-24 * 2 * math.pi)
        pairs = torch.stack([angle.cos().mul_(radius), angle.sin().mul_(radius)], dim=1)
        return pairs.flatten(1)[:, :count].reshape(len(self.keys), *shape)

    def signs(self, *shape: int) -> Tensor:
        """-1 or +1 with equal chance, float32 of shape (B, *shape)."""
        return (_shift_right(self.bits(*shape), 63) * 2 - 1).float()

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Uniform integers in [low, high), int64 of shape (B, *shape); ``high - low`` is far below 2**31."""
        return low + _shift_right(_shift_right(self.bits(*shape), 32) * (high - low), 32)
