"""The pool: bytes, owners, leases. Knows nothing of models."""
