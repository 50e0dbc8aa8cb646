"""Loading models and the one place that knows transformers' moving API."""
