"""Which models exist, what each needs, and what would fit this machine."""
