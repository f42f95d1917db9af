"""Triton kernels for CUDA, and the launches around them. Imported only where a GPU was chosen."""
