"""What this machine offers, and each hardware-dependent default with its reason."""
