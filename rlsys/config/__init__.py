"""The tree of options: its schema, how it is read, short forms, suggestions. The ground floor: it imports nothing of ours but types."""
