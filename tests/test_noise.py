import numpy as np
import torch

from hardsphere.noise import Noise


def test_numbers_do_not_depend_on_the_batch() -> None:
    whole = Noise(3, torch.arange(10)).fold("pgd", 2).normal(3, 4)
    part = Noise(3, torch.tensor([7, 2])).fold("pgd", 2).normal(3, 4)
    assert torch.equal(whole[[7, 2]], part)
    assert torch.equal(Noise(3, torch.arange(10))[torch.tensor([7, 2])].fold("pgd", 2).normal(3, 4), part)


def test_seed_sample_and_purpose_each_change_the_stream() -> None:
    ids = torch.arange(2)
    base = Noise(0, ids).fold("a", 1).uniform(1000)
    others = [Noise(1, ids).fold("a", 1), Noise(0, ids).fold("b", 1), Noise(0, ids).fold("a", 2)]
    for stream in [*(other.uniform(1000)[0] for other in others), base[1]]:
        assert torch.corrcoef(torch.stack([base[0], stream]))[0, 1].abs() < 0.12  # 3.8 standard deviations


def test_a_step_may_be_a_tensor() -> None:
    noise = Noise(0, torch.arange(4))
    assert torch.equal(noise.fold(torch.tensor(5)).bits(3), noise.fold(5).bits(3))


def test_seeds_and_steps_of_numpy_are_those_of_python() -> None:
    ids = torch.arange(4)
    assert torch.equal(Noise(np.int64(3), ids).fold(np.int64(2)).bits(3), Noise(3, ids).fold(2).bits(3))


def test_moments_and_ranges() -> None:
    noise = Noise(11, torch.arange(100))
    uniform, normal = noise.fold("u").uniform(2000), noise.fold("n").normal(2000)
    signs, integers = noise.fold("s").signs(2000), noise.fold("i").integers(-2, 5, 2000)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    # Five standard errors of the mean and of the variance over 200,000 numbers.
    assert abs(uniform.mean() - 0.5) < 5 * (1 / 12 / 2e5) ** 0.5
    assert abs(normal.mean()) < 5 / 2e5**0.5
    assert abs(normal.var() - 1) < 5 * (2 / 2e5) ** 0.5
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.mean()) < 5 / 2e5**0.5
    counts = torch.bincount(integers.flatten() + 2, minlength=7)
    assert counts.min() > 200_000 / 7 - 5 * (2e5 / 7) ** 0.5
    assert integers.min() == -2
    assert integers.max() == 4


def test_known_values_are_frozen() -> None:
    """Recorded outcomes depend on these numbers: changing the generator would change them silently."""
    bits = Noise(0, torch.arange(2)).fold("frozen", 1).bits(2)
    assert bits.tolist() == [[1870771704333588649, 8367393030030993567], [812222485036572420, -7700798516271269576]]
