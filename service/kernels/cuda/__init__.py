"""Triton kernels for CUDA, and the code that launches them. Imported only if a GPU was chosen."""
