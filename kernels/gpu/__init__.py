"""Every kernel on the GPU: built, compared with PyTorch in fp64, timed against PyTorch's own.

    make gpu                                  # python -m kernels.gpu
    python -m kernels.gpu matmul flash        # cases whose name contains one of these words

On a machine without a GPU it says so in one line. The cases themselves also run without one, small,
through the emulator and Triton's interpreter: that is how they are tested. Not yet run on a GPU.
"""

from __future__ import annotations
