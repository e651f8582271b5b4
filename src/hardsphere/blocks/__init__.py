"""Residual blocks of a frozen network as two kernels forwards and two backwards, on a GPU that has these kernels.

A pre-activation block (He et al. 2016) makes from the image t of the block before and its activation a = relu(norm(t))

    b = relu(norm(conv(a))),    t' = conv(b) + t,    a' = relu(norm(t')),

and where the shape changes the first convolution has a stride, and a 1x1 convolution of a takes the place of t in the
sum. Everything but the convolutions is cheap arithmetic and expensive memory traffic, so each kernel of
`hardsphere.kernels.convolution` does what comes after its convolution as well, backwards too. Of a block of another
kind only the second half may be fused (`Tail`). Both are found in a network whose norms are fused already
(`hardsphere.norms`). Where the images do not suit the kernels, the layers are asked one by one.
"""

from hardsphere.blocks.finding import fuse_blocks
from hardsphere.blocks.layers import compile_kernels, has_blocks, many

__all__ = ["compile_kernels", "fuse_blocks", "has_blocks", "many"]
