"""`rlsys doctor`: alone, whether this machine can train; with a configuration, whether engines and policy agree too."""
