"""Low-precision number formats: one quantiser for refits, the engine and checkpoints. torch and records only."""
