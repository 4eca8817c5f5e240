"""Kernels in torch, for every device. The other kernels are tested against them."""
