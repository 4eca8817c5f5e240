"""Kernels in C++ for CPUs with AVX2 or AVX-512, compiled where they run; everything they do has a
twin in torch, used elsewhere.
"""
