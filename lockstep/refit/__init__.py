"""Giving a running engine the trainer's new weights, as a transaction with a receipt."""
