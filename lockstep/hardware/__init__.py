"""What this machine is, and each default with its reason."""
