"""Commands around training: what they start, they start through `launch`, and training knows none of them."""
