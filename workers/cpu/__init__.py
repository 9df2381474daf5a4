"""What makes engines on CPU fast and reproducible. A GPU user never opens it."""
