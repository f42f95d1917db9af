"""The arithmetic: a plain reference that is the truth, and faster paths that must agree with it."""
