"""What the loop is made of: assembly of the parts, sampling of groups, evaluation, state and the console."""
