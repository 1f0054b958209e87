"""PaTH attention as Triton kernels."""
