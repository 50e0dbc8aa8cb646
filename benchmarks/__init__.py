"""Side-by-side measurements; each prints one JSON object. Run from the repository: ``python -m benchmarks.end_to_end``.

What they found, and what limits each, is in NOTES.md.
"""
