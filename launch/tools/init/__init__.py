"""`rlsys init`: options, dataset_presets ─▶ choose ─▶ render ─▶ a commented configuration."""
