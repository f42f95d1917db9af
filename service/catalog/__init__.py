"""Which models there are, what each needs, and what would fit this machine."""
