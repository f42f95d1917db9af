"""Measuring: load, prefill and decode of a model, beside the read ceiling of the machine and beside a peer in the same run."""
