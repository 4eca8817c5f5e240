"""C++ kernels for CPUs with AVX2 or AVX-512, compiled on the machine that uses them."""
