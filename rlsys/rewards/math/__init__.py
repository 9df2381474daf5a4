"""The reward `math`: final answers found, normalised and compared."""
