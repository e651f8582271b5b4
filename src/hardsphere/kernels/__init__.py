"""Triton kernels; imported only on a GPU, and only where Triton is: it comes with torch's builds for one."""

from hardsphere.kernels.convolution import compiled_together, convolve, convolve_back
from hardsphere.kernels.pixelwise import affine, affine_backward, shortest

__all__ = ["affine", "affine_backward", "compiled_together", "convolve", "convolve_back", "shortest"]
