"""Group-relative policy optimisation: the algorithm, the loop and the types, with no cluster in sight."""

__version__ = "0.1.0"
