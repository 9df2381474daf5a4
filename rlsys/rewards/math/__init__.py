"""The reward `math`: final answers found, normalized and compared."""
