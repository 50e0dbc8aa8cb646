"""Problems, prompts and rewards."""
