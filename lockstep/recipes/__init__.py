"""Recipes: Python functions that return a whole RunConfig."""
