"""What a network is: one declarative file per model_type over shared layers."""
