"""The state of Megatron's optimizers, by parameter."""
