"""Rollout engines and sampling."""
