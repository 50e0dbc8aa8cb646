"""Environment variables: what is declared, inherited and effective, and whether anybody reads it."""
