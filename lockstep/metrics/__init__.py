"""What a run writes down, and the report page."""
