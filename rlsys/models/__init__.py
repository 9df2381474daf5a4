"""The sizes of a model, from its config.json or from a table of well-known models. Nothing is downloaded."""
