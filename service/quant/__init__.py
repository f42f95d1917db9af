"""Quantized weights: formats as data, packings of published checkpoints, and what a packed weight means."""
