"""The turn loop of an engine: what it says to episode workers, and what it tells the driver."""
