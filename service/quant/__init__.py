"""Quantized weights: formats as data, packing, and what a packed weight means."""
