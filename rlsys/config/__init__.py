"""The configuration: its schema, how it is read, short forms, suggestions. It imports nothing else of the project."""
