"""Compiled C kernels for the CPU, and how they are built, loaded and called."""
