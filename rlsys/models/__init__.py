"""What a model is made of, read from its config.json or from a table of usual sizes. Nothing is downloaded."""
