"""The trainer, its losses, advantages, corrections and packing."""
