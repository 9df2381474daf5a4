"""vLLM engines, and the driver's handle to them."""
