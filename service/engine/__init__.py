"""From request to token: scheduler, runner, sampler."""
