"""What a network is: one declarative file a model_type over shared layers."""
