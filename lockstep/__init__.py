"""Lockstep: RL post-training in which the trainer and the rollout engine are proved to run the same policy."""

__version__ = "0.1.0"
