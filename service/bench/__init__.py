"""Measuring on this machine: load, prefill, decode, beside peers in the same run."""
