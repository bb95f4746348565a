"""Tensor functions and kernels without policy."""
