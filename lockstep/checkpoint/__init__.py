"""Checkpoints on disk: validated, pruned, quantised and converted, tensor by tensor, without loading a model."""
