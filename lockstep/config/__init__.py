"""The run configuration: schema, cross-field checks, loading."""
